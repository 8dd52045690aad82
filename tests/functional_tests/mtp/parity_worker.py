"""Gradients and metrics under context parallelism against one rank; run by torchrun.

    torchrun --nproc-per-node N parity_worker.py GRID

Every rank computes the CP=1 reference of its share of the cases in a world without context
parallelism, then all ranks together compute every case with CP=N, and each compares its share. The
grid "upstream" uses nothing that the series adds to Megatron: it also runs on a tree without it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Iterator

import torch
import torch.distributed as dist

from tests.support import (
    Batch,
    ModelSpec,
    bshd_batch,
    build_model,
    cp_shard,
    fp64_cross_entropy,
    grads_by_name,
    is_mtp_param,
    parallel_world,
    thd_batch,
    worst_difference,
)
from tests.support.release import counts_acceptance, derives_targets
from tests.support.worker import main

MASKS = ("full", "prompt", "one-hot", "empty")
DEPTHS = (1, 2, 3)
LAYOUTS = ("bshd", "thd-padded", "thd-unpadded")
VARIANTS = ("no-labels", "normalizer", "path", "ignored-labels")


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of a grid.

    ``detached`` sets ``mtp_detach_heads``: then every gradient outside MTP comes from the main loss
    alone. ``variant``: "plain" token losses; "no-labels" and "normalizer" work on logits, the
    latter with labels; "path" is the mask mode; "ignored-labels" marks with -100, without a mask.
    """

    family: str
    layout: str
    mask: str
    per_token: bool
    depths: int
    repeated: bool
    detached: bool
    variant: str = "plain"

    @property
    def spec(self) -> ModelSpec:
        """The case's model."""
        overrides: dict[str, Any] = dict(mtp_detach_heads=self.detached)
        if self.variant == "path":
            overrides["mtp_loss_mask_mode"] = "path"
        return ModelSpec(
            family=self.family,
            mtp_num_layers=self.depths,
            repeated=self.repeated,
            per_token=self.per_token,
            hidden_size=16,
            num_attention_heads=2,
            overrides=overrides,
        )

    @property
    def batch(self) -> Batch:
        """The case's whole batch; every sequence divides by 8, for CP up to 4."""
        if self.layout == "bshd":
            return bshd_batch(mask=self.mask)
        padded = {"thd-padded": (8, 16, 8), "thd-unpadded": None}[self.layout]
        lengths = (8, 16, 8) if padded is None else (5, 11, 8)
        return thd_batch(lengths, padded, mask=self.mask)


def grid(name: str) -> Iterator[Case]:
    """The cases of a grid, those of one model together.

    "whole": the acceptance grid, GPTModel with every combination, HybridModel with D=2, and the
    variants with one mask and model. "packed": what ranks that share a GPU can compute, whose
    backend sends nothing from rank to rank. "upstream": what an unpatched tree is shown with.
    """
    if name == "packed":
        for per_token, layout, mask in itertools.product((False, True), LAYOUTS[1:], MASKS):
            yield Case("gpt", layout, mask, per_token, 2, False, detached=False)
        return
    if name == "upstream":
        for per_token, layout, mask in itertools.product((False, True), LAYOUTS, MASKS):
            yield Case("gpt", layout, mask, per_token, 2, False, detached=True)
        return
    models = itertools.product((False, True), DEPTHS, (False, True))
    for per_token, depths, repeated in models:
        for layout, mask in itertools.product(LAYOUTS, MASKS):
            yield Case("gpt", layout, mask, per_token, depths, repeated, detached=False)
    for per_token, repeated in itertools.product((False, True), repeat=2):
        for layout, mask in itertools.product(LAYOUTS, MASKS):
            yield Case("hybrid", layout, mask, per_token, 2, repeated, detached=repeated)
    variants = [v for v in VARIANTS if v != "no-labels" or derives_targets()]
    for per_token, variant, layout in itertools.product((False, True), variants, LAYOUTS):
        yield Case("gpt", layout, "prompt", per_token, 2, False, detached=False, variant=variant)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Reduced gradients and logged metrics of one case."""

    gradients: dict[str, torch.Tensor]
    metrics: dict[str, torch.Tensor]


def compare(grid_name: str) -> list[dict[str, Any]]:
    """One record per case, in order; see `_record`."""
    cases = list(grid(grid_name))
    with fp64_cross_entropy():
        with parallel_world() as groups:
            rank, ranks = dist.get_rank(), dist.get_world_size()
            mine = range(rank, len(cases), ranks)
            wanted = _outcomes([cases[i] for i in mine], groups, reduce=False)
        with parallel_world(cp=ranks) as groups:
            got = _outcomes(cases, groups, reduce=True)
            share = [_record(cases[i], got[i], want) for i, want in zip(mine, wanted)]
            shares = [None] * ranks
            dist.all_gather_object(shares, share)
    return [shares[i % ranks][i // ranks] for i in range(len(cases))]


def _outcomes(cases: list[Case], groups, reduce: bool) -> list[Outcome]:
    """Train one step of every case; models are built once for cases that share them."""
    outcomes, spec, model = [], None, None
    for case in cases:
        if case.spec != spec:
            spec = case.spec
            model = build_model(spec)
        outcomes.append(_outcome(model, case, groups, reduce))
    return outcomes


def _outcome(model, case: Case, groups, reduce: bool) -> Outcome:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    cp = groups.cp.size()
    whole = case.batch
    part = cp_shard(whole, cp, groups.cp.rank())
    model.zero_grad(set_to_none=True)
    MTPLossLoggingHelper.tracker.clear()
    losses_BS = _main_losses(model, case, part, cp)
    loss = (losses_BS * part.loss_mask).sum()
    if not case.per_token:  # DDP averages over CP ranks in this mode, and sums in the other
        loss = cp * loss / whole.loss_mask.sum().clamp(min=1)
    loss.backward()
    gradients = grads_by_name(model)
    if reduce:
        gradients = _reduced(gradients, groups.cp, average=not case.per_token)
    metrics = _metrics(model, groups.cp if reduce else None)
    return Outcome({n: g.cpu() for n, g in gradients.items()}, metrics)


def _metrics(model, group) -> dict[str, torch.Tensor]:
    """Per depth: loss, right predictions, all predictions; reduced over a group unless None."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    if counts_acceptance():
        if group is not None:
            MTPLossLoggingHelper.reduce_metrics_in_tracker()
        tracker = MTPLossLoggingHelper.tracker
        names = ("loss", "correct", "total")
        return {name: tracker[f"{name}_values"].cpu().clone() for name in names}
    from megatron.core.transformer.mtp_objective.metrics import MetricSums

    model_sums = MetricSums.of(model)
    sums, model_sums.sums = model_sums.sums, None
    if group is not None:
        dist.all_reduce(sums, group=group)
    loss, weight, correct, total = sums[:-2].cpu().view(-1, 4).unbind(1)
    return {"loss": loss / weight.clamp(min=1), "correct": correct, "total": total}


def _main_losses(model, case: Case, part: Batch, cp: int) -> torch.Tensor:
    """Any differentiable [b, s] of this rank's part, which the caller masks and sums."""
    kwargs = part.forward_kwargs()
    if case.variant == "no-labels":
        kwargs["labels"] = None
    elif case.variant == "ignored-labels":
        kwargs |= dict(labels=part.labels.masked_fill(part.loss_mask == 0, -100), loss_mask=None)
    elif case.variant == "normalizer":
        # Nothing cancels DDP's mean over CP ranks here: that is the caller's part.
        normalizer = 5.0 if case.per_token else 5.0 / cp
        kwargs |= dict(return_logits=True, mtp_loss_normalizer=normalizer)
    output = model(**kwargs)
    if output.dim() == 2:
        return output
    wanted = torch.linspace(-1.0, 1.0, output.size(-1), dtype=output.dtype, device=output.device)
    return (output * wanted * (1 + part.labels.unsqueeze(-1))).sum(-1) / 64


def _reduced(gradients: dict[str, torch.Tensor], group, average: bool) -> dict[str, torch.Tensor]:
    """Summed (or averaged) over the group in one exchange, as DDP does with a bucket."""
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    dist.all_reduce(flat, group=group)
    if average:
        flat /= group.size()
    pieces = flat.split([gradient.numel() for gradient in gradients.values()])
    return {n: piece.view_as(g) for (n, g), piece in zip(gradients.items(), pieces)}


def _record(case: Case, got: Outcome, want: Outcome) -> dict[str, Any]:
    """The case, its worst relative differences, and how large the gradients are."""
    record: dict[str, Any] = dataclasses.asdict(case)
    for group in ("mtp", "rest"):
        names = [n for n in want.gradients if is_mtp_param(n) == (group == "mtp")]
        wanted = {n: want.gradients[n] for n in names}
        error, where = worst_difference({n: got.gradients[n] for n in names}, wanted)
        record[f"{group}_error"], record[f"{group}_worst"] = error, where
        record[f"{group}_largest"] = max(g.abs().max().item() for g in wanted.values())
        record[f"{group}_smallest"] = min(g.abs().max().item() for g in wanted.values())
    for name in want.metrics:
        record[name] = [got.metrics[name].tolist(), want.metrics[name].tolist()]
    return record


if __name__ == "__main__":
    main(compare)
