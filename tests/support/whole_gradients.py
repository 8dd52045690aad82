"""Gradients of a model that is split over ranks, put together under the names of the whole model."""

from __future__ import annotations

from typing import Any, Iterable

import torch
import torch.distributed as dist

from tests.support.gradients import grads_by_name
from tests.support.weights import whole_model_name


def whole_gradients(chunks: Iterable[torch.nn.Module], groups: Any) -> dict[str, torch.Tensor]:
    """The gradients of all ranks, summed and joined as a step of Megatron would see them.

    Sums over data- and context-parallel ranks (over expert-data-parallel ones for experts), over
    the tensor-parallel ranks of what sequence parallelism replicates, and over the pipeline stages
    that hold a copy of the same parameter (the embedding of a stage with heads, a tied output
    layer). Joins tensor-parallel parts. Nothing is averaged.

    Args:
        chunks: This rank's model, or its virtual pipeline stages.
        groups: A ``ProcessGroupCollection``.

    Returns:
        Gradients by the parameter's name in the unsplit model, the same on every rank, on the CPU.

    Raises:
        AssertionError: Tensor-parallel ranks disagree about a replicated parameter's gradient.
    """
    mine: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        parameters, gradients = dict(chunk.named_parameters()), grads_by_name(chunk)
        for name, gradient in gradients.items():
            expert = ".experts." in name
            _sum(gradient, groups.expt_dp if expert else groups.dp_cp)
            tp_group = groups.expt_tp if expert else groups.tp
            gradient = _whole(name, parameters[name], gradient, tp_group)
            whole_name = whole_model_name(name, chunk, groups)
            mine[whole_name] = mine.get(whole_name, 0) + gradient.cpu()
    return _joined(_joined([mine], groups.pp, summed=True), groups.ep, summed=False)


def _whole(name: str, parameter, gradient: torch.Tensor, group: Any) -> torch.Tensor:
    if group.size() == 1:
        return gradient
    if getattr(parameter, "sequence_parallel", False):
        return _sum(gradient, group)
    parts = [torch.empty_like(gradient) for _ in range(group.size())]
    dist.all_gather(parts, gradient.contiguous(), group=group)
    if getattr(parameter, "tensor_model_parallel", False):
        stride = parameter.partition_stride
        pieces = [part.chunk(stride, dim=parameter.partition_dim) for part in parts]
        ordered = [rank_pieces[i] for i in range(stride) for rank_pieces in pieces]
        return torch.cat(ordered, dim=parameter.partition_dim)
    for part in parts:
        torch.testing.assert_close(part, gradient, msg=f"{name} differs between ranks")
    return gradient


def _sum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def _joined(found, group: Any, summed: bool) -> Any:
    """Merge the dictionaries of all ranks; add up what several have, or take one of the equal."""
    (mine,) = found if isinstance(found, list) else (found,)
    everyones = [None] * group.size()
    if group.size() == 1:
        return mine
    dist.all_gather_object(everyones, mine, group=group)
    merged: dict[str, torch.Tensor] = {}
    for gradients in everyones:
        for name, gradient in gradients.items():
            merged[name] = merged[name] + gradient if summed and name in merged else gradient
    return merged
