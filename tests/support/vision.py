"""Vision-language batches: embeddings merged outside of the model, placeholders in the ids.

Tokens of the test batches have ids of their own at every position. So a model that embeds those
ids with a table, on one rank, computes by another way what a model computes that is given the
table's rows as ``decoder_input`` and knows no ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.batches import Batch, Mask, bshd_batch, cp_shard, thd_batch
from tests.support.device import device, prepare
from tests.support.models import ModelSpec, build_model
from tests.support.objective import step_gradients
from tests.support.parallel import parallel_world
from tests.support.split import SplitCase
from tests.support.standin import fp64_cross_entropy
from tests.support.whole_gradients import whole_gradients

PLACEHOLDER = 63
EMBEDDING = "embedding.word_embeddings.weight"
GIVEN = "decoder_input"


@dataclasses.dataclass(frozen=True)
class VisionCase(SplitCase):
    """A `SplitCase` of one microbatch.

    Attributes:
        mask: Of `bshd_batch` and `thd_batch`.
    """

    mask: Mask = "prompt"

    def batch(self) -> Batch:
        """The whole microbatch."""
        if self.layout == "bshd":
            return bshd_batch(2, 8, self.mask)
        return thd_batch((7, 3), (8, 8), self.mask)


def feature_table(spec: ModelSpec) -> torch.Tensor:
    """Features of every position by its id, [v, h]: not the model's own embedding.

    Id 0, which an id reads as past the end of its sequence, has zeros, as rows have there.
    """
    generator = torch.Generator().manual_seed(77)
    table = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator, dtype=torch.float64)
    table[0] = 0
    return (0.3 * table).to(device(), spec.dtype)


def given_rows(batch: Batch, spec: ModelSpec) -> torch.Tensor:
    """``decoder_input`` of a batch, [s, b, h], of all its positions; a leaf with gradient."""
    rows_BSH = F.embedding(batch.input_ids, feature_table(spec))
    return rows_BSH.transpose(0, 1).contiguous().requires_grad_()


def placeholders(batch: Batch) -> torch.Tensor:
    """Ids that say nothing, [b, s]."""
    return torch.full_like(batch.input_ids, PLACEHOLDER)


def given_gradients(case: VisionCase) -> dict[str, torch.Tensor]:
    """Gradients of a model that is given embeddings, split as the case says; on every rank.

    Returns:
        As `whole_gradients`, and under "decoder_input" those of the features, [v, h] by id.
    """
    spec = case.spec(whole=False)
    with fp64_cross_entropy(), parallel_world(**case.sizes) as groups:
        cp, tp = groups.cp, groups.tp
        batch = cp_shard(case.batch(), cp.size(), cp.rank())
        ids_SB = batch.input_ids.t()
        rows_SBH = given_rows(batch, spec).detach()
        model = build_model(spec, groups)
        if model.config.sequence_parallel:
            ids_SB, rows_SBH = (part.chunk(tp.size())[tp.rank()] for part in (ids_SB, rows_SBH))
        rows_SBH = rows_SBH.clone().requires_grad_()
        given = dict(decoder_input=rows_SBH, input_ids=placeholders(batch), **case.forward)
        step_gradients(model, batch, case.main_weight, **given)
        found = whole_gradients([model], groups)
        table = torch.zeros_like(feature_table(spec))
        table.index_add_(0, ids_SB.flatten(), rows_SBH.grad.flatten(0, 1))
        if model.config.sequence_parallel:
            dist.all_reduce(table, group=tp)
        dist.all_reduce(table, group=cp)
        found[GIVEN] = table.cpu()
        parts = 1 if spec.per_token else cp.size()
        return {name: gradient / parts for name, gradient in found.items()}


def embedded_gradients(case: VisionCase) -> dict[str, torch.Tensor]:
    """The same by ids that a table embeds, whole on one rank."""
    spec = case.spec(whole=True)
    with fp64_cross_entropy(), parallel_world() as groups:
        model = build_model(spec, groups)
        with torch.no_grad():
            model.embedding.word_embeddings.weight.copy_(feature_table(spec))
        step_gradients(model, case.batch(), case.main_weight, **case.forward)
        found = whole_gradients([model], groups)
        found[GIVEN], found[EMBEDDING] = found[EMBEDDING], torch.zeros_like(found[EMBEDDING])
        if case.layout == "bshd":
            found[GIVEN][0] = 0  # read past the end alone, where nothing was given
        return found


def given_gradients_of(cases: Mapping[Any, VisionCase]) -> dict[Any, dict[str, torch.Tensor]]:
    """Rank function: `given_gradients` of cases of one world size."""
    prepare()
    return {name: given_gradients(case) for name, case in cases.items()}
