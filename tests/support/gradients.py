"""Reading, reducing and comparing gradients."""

from __future__ import annotations

from typing import Any, Mapping

import torch
import torch.distributed as dist


def grads_by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter's gradient (``main_grad`` where DDP keeps one).

    A parameter without a gradient counts as zero.
    """
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        gradients[name] = gradient.detach().clone()
    return gradients


def all_reduce_gradients(model: torch.nn.Module, group: Any, average: bool = False) -> None:
    """Sum (or average) the gradients over ``group``, as DDP does at the end of a step.

    Averaging is DDP's way without ``calculate_per_token_loss``, summing its way with it.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
        if average:
            parameter.grad /= group.size()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute wanted value; 0 when both are zero."""
    if got.shape != want.shape:
        raise ValueError(f"relative_error: got shape {tuple(got.shape)}, want {tuple(want.shape)}")
    if not want.numel():
        return 0.0
    difference = (got.double() - want.double()).abs().max().item()
    scale = want.double().abs().max().item()
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale


def worst_difference(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest `relative_error` over all names, and the name; NaN counts as infinite.

    Raises:
        ValueError: The names differ.
    """
    if different := sorted(got.keys() ^ want.keys()):
        raise ValueError(f"worst_difference: only on one side: {different}")
    errors = ((relative_error(got[name], want[name]), name) for name in want)
    return max((float("inf") if error != error else error, name) for error, name in errors)
