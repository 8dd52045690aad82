"""Gradients through the 1F1B expert-overlap path: a schedule plan instead of ``forward``.

    python overlap.py OUTPUT

saves, for isolated heads with and without labels, the gradients of ``forward`` and of the plan when
the main loss counts for nothing. Uses nothing that the series adds to Megatron, so that it also runs
in the release below it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.support.batches import bshd_batch
from tests.support.device import prepare
from tests.support.gradients import grads_by_name
from tests.support.models import ModelSpec, build_model
from tests.support.objective import step_gradients
from tests.support.parallel import parallel_world
from tests.support.ranks import run_ranks


def overlap_spec(isolated: bool = False, **fields: Any) -> ModelSpec:
    """A model that the overlap path accepts; its bf16 flag is set, its parameters are float64.

    Args:
        isolated: ``mtp_detach_heads``, upstream's name.
        fields: Of `ModelSpec`; ``overrides`` are added to those the path needs.
    """
    overrides = dict(
        overlap_moe_expert_parallel_comm=True,
        moe_token_dispatcher_type="alltoall",
        bf16=True,
        mtp_detach_heads=isolated,
        **fields.pop("overrides", {}),
    )
    sizes = dict(mtp_num_layers=1, num_experts=4, hidden_size=16, num_attention_heads=2)
    return ModelSpec(**{**sizes, **fields}, overrides=overrides)


def plan_gradients(model: torch.nn.Module, main_weight: float, **forward: Any):
    """What `step_gradients` returns, computed by the model's schedule plan."""
    from megatron.core.models.common.model_chunk_schedule_plan import (
        TransformerModelChunkSchedulePlan,
    )
    from megatron.core.pipeline_parallel.utils import set_streams

    set_streams()
    model.zero_grad(set_to_none=True)
    plan = model.build_schedule_plan(**forward)
    output = TransformerModelChunkSchedulePlan.run(plan, None)
    generator = torch.Generator().manual_seed(99)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    TransformerModelChunkSchedulePlan.run(None, plan, b_grad=main_weight * weights.to(output))
    return grads_by_name(model)


def isolated_gradients() -> dict[str, dict[str, torch.Tensor]]:
    """The rank function of the script."""
    with parallel_world(ep=2):
        model = build_model(overlap_spec(isolated=True))
        found = {}
        for case, changed in (("labels", {}), ("no labels", dict(labels=None))):
            forward = {**bshd_batch(2, 8).forward_kwargs(), **changed}
            found[f"forward, {case}"] = step_gradients(model, None, 0.0, **forward)
            found[f"plan, {case}"] = plan_gradients(model, 0.0, **forward)
        return found


if __name__ == "__main__":
    prepare()
    from tests.support import overlap

    torch.save(run_ranks(overlap.isolated_gradients, 2, timeout=120)[0], sys.argv[1])
