"""The same step on one rank and on a split model, for tests that compare the two."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Mapping, Sequence

import torch

from tests.support.batches import Batch, bshd_batch, cp_shard, thd_batch
from tests.support.device import prepare
from tests.support.models import ModelSpec
from tests.support.parallel import parallel_world
from tests.support.pipeline import build_stages, schedule_gradients, world_options
from tests.support.ranks import run_ranks
from tests.support.standin import fp64_cross_entropy

_MASKS = ("full", "prompt", "one-hot", "full")
# Fields of TransformerConfig that only the model under test has, not the one it is compared with.
_SPLIT_ONLY = (
    "sequence_parallel",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_layout",
    "virtual_pipeline_model_parallel_size",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "mtp_loss_chunk_size",
)


@dataclasses.dataclass(frozen=True)
class SplitCase:
    """One combination.

    Attributes:
        sizes: tp, cp, pp, ep, and ``dp`` for more data-parallel ranks than ep.
        fields: Of `ModelSpec`, ``overrides`` aside.
        overrides: TransformerConfig fields.
        layout: "bshd" or "thd".
        forward: Further arguments of the model's forward.
        main_weight: Factor of the main loss, see `schedule_gradients`.
    """

    sizes: Mapping[str, int]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: str = "bshd"
    forward: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    main_weight: float = 1.0

    @property
    def ranks(self) -> int:
        """World size; data parallelism comes from ``ep`` or ``dp``."""
        dense = [self.sizes.get(name, 1) for name in ("tp", "cp", "pp")]
        data = self.sizes.get("dp", 1)
        if self.overrides.get("expert_tensor_parallel_size") != 1:
            data = max(data, self.sizes.get("ep", 1))
        return math.prod(dense) * data

    def spec(self, whole: bool) -> ModelSpec:
        """The model, for one rank or for the split."""
        left_out = _SPLIT_ONLY if whole else ()
        overrides = {k: v for k, v in self.overrides.items() if k not in left_out}
        sizes = dict(num_layers=2, hidden_size=16, num_attention_heads=4)
        return ModelSpec(**{**sizes, **self.fields}, overrides=overrides)

    def batches(self) -> list[Batch]:
        """The microbatches of the global batch: four, or six for three interleaved stages."""
        masks = _MASKS + _MASKS[:2] if self.sizes.get("pp") == 3 else _MASKS
        if self.layout == "bshd":
            return [bshd_batch(2, 8, mask) for mask in masks]
        places = (8, 8) if self.sizes.get("cp") == 4 else (8, 4)
        return [thd_batch((7, 3), places, mask) for mask in masks]


def case_gradients(case: SplitCase, whole: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of the whole model after one global batch; see `whole_gradients` for the names.

    Args:
        case: What to run.
        whole: On one rank, without any split.
    """
    spec = case.spec(whole)
    sizes = {} if whole else {k: v for k, v in case.sizes.items() if k != "dp"}
    options = world_options(spec, sizes.get("pp", 1))
    if "expert_tensor_parallel_size" in spec.overrides:
        options["expert_tensor_parallel_size"] = spec.overrides["expert_tensor_parallel_size"]
    with fp64_cross_entropy(), parallel_world(**sizes, **options) as groups:
        dp, cp = groups.dp.size(), groups.cp.size()
        batches = case.batches()[groups.dp.rank() :: dp]
        batches = [cp_shard(batch, cp, groups.cp.rank()) for batch in batches]
        stages = build_stages(spec, groups)
        gradients = schedule_gradients(
            stages, groups, batches, case.main_weight, **case.forward
        )
        parts = 1 if spec.per_token else dp * cp
        return {name: gradient / parts for name, gradient in gradients.items()}


class Comparison:
    """The cases of a test module, run in one launch per world size."""

    def __init__(self, cases: Mapping[Any, SplitCase]):
        self.cases = cases
        self._failed: dict[int, BaseException] = {}
        self._of_world = functools.cache(self._run_world)

    def of(self, name: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(gradients of the split, gradients of one rank)."""
        case = self.cases[name]
        return self._of_world(case.ranks)[name], case_gradients(case, whole=True)

    def _run_world(self, ranks: int) -> dict[Any, dict[str, torch.Tensor]]:
        if ranks in self._failed:  # not again for every case
            raise self._failed[ranks]
        mine = {name: case for name, case in self.cases.items() if case.ranks == ranks}
        try:
            return run_ranks(_run_cases, ranks, mine, timeout=60 + 10 * len(mine))[0]
        except AssertionError as error:
            self._failed[ranks] = error
            raise


def _run_cases(cases: Mapping[Any, SplitCase]) -> dict[Any, dict[str, torch.Tensor]]:
    prepare()
    return {name: case_gradients(case) for name, case in cases.items()}


def heads_of(gradients: Mapping[str, Any]) -> Sequence[str]:
    """Names of the heads' parameters among those of a whole model."""
    return [name for name in gradients if "mtp" in name.split(".")]
