"""Steps through Megatron's own schedules, on any number of pipeline stages, and their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, Sequence

import torch

from tests.support.batches import Batch
from tests.support.models import ModelSpec, build_model
from tests.support.whole_gradients import whole_gradients


def build_stages(spec: ModelSpec, groups: Any) -> list[torch.nn.Module]:
    """This rank's part of the model: one element, or one per virtual pipeline stage.

    Args:
        spec: What to build. A ``pipeline_model_parallel_layout`` or
            ``virtual_pipeline_model_parallel_size`` among its overrides decides how many.
        groups: Process groups of the `parallel_world`, opened with the same number of virtual
            stages.
    """
    first = build_model(spec, groups, vp_stage=0 if _virtual_stages(spec, groups) > 1 else None)
    more = range(1, first.config.virtual_pipeline_model_parallel_size or 1)
    return [first] + [build_model(spec, groups, vp_stage=stage) for stage in more]


def world_options(spec: ModelSpec, pp: int) -> dict[str, Any]:
    """Arguments of `parallel_world` that ``spec`` needs beside its sizes."""
    layout = spec.overrides.get("pipeline_model_parallel_layout")
    chunks = spec.overrides.get("virtual_pipeline_model_parallel_size", 1)
    chunks = len(layout.split("|")) // pp if layout else chunks
    options: dict[str, Any] = {}
    if chunks > 1:
        options["virtual_pipeline_model_parallel_size"] = chunks
    return options


def schedule_gradients(
    stages: Sequence[torch.nn.Module],
    groups: Any,
    batches: Sequence[Batch],
    main_weight: float = 0.0,
    forward_only: bool = False,
    **forward: Any,
) -> dict[str, torch.Tensor]:
    """Gradients of the whole model after one global batch through ``forward_backward_func``.

    The loss of a microbatch is the model's output, weighted with fixed random numbers, times
    ``main_weight``, as in `step_gradients`.

    Args:
        stages: What `build_stages` returned.
        groups: Their process groups.
        batches: This rank's microbatches.
        main_weight: Factor of the main loss.
        forward_only: Evaluate; all gradients are zero then.
        forward: Replaces or adds arguments of the model's forward.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for stage in stages:
        stage.zero_grad(set_to_none=True)
    config = stages[0].config
    rows, length = batches[0].input_ids.shape
    run = get_forward_backward_func(
        pp_size=groups.pp.size(), vp_size=config.virtual_pipeline_model_parallel_size
    )
    run(
        forward_step_func=partial(_forward_step, main_weight=main_weight, forward=forward),
        data_iterator=[iter(batches) for _ in stages] if len(stages) > 1 else iter(batches),
        model=list(stages),
        num_microbatches=len(batches),
        seq_length=length * groups.cp.size(),
        micro_batch_size=rows,
        forward_only=forward_only,
    )
    return whole_gradients(stages, groups)


def _forward_step(iterator, model, return_schedule_plan=False, *, main_weight, forward):
    batch = next(iterator)
    arguments = {**batch.forward_kwargs(), **forward}
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(**arguments), partial(_loss, model.config, main_weight, batch)


def _loss(config, main_weight: float, batch: Batch, output: torch.Tensor):
    generator = torch.Generator().manual_seed(99)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    loss = main_weight * (output * weights.to(output)).sum()
    if config.calculate_per_token_loss:
        return loss, batch.loss_mask.sum().int(), {}
    return loss, {}


def _virtual_stages(spec: ModelSpec, groups: Any) -> int:
    options = world_options(spec, groups.pp.size())
    return options.get("virtual_pipeline_model_parallel_size", 1)
