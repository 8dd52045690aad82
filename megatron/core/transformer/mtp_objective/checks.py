"""Argument checks of the MTP objective: what was expected, what came, what to change."""

from typing import Optional

import torch
from torch import Tensor


def require_condition(condition: Tensor, message: str, shown: Optional[Tensor] = None) -> None:
    """Raise ``ValueError(message)`` if a boolean tensor is false, without a host synchronisation.

    Args:
        condition: bool tensor with one element.
        message: the whole error text, in which ``{shown}`` stands for the values of ``shown``.
        shown: what the condition is about; read only where it fails and lies on the CPU.

    Raises:
        ValueError: on the CPU, at once. On an accelerator the check is an asynchronous device
            assertion (``RuntimeError`` at the next synchronisation), so that a training step
            never waits for it.
    """
    if condition.device.type != "cpu":
        torch._assert_async(condition, message.format(shown="(on the device)"))
        return
    try:
        torch._assert_async(condition, message)
    except RuntimeError:
        values = None if shown is None else shown.tolist()
        raise ValueError(message.format(shown=values)) from None


def require_token_ids(name: str, tokens: Tensor) -> None:
    """Raise ``TypeError`` unless ``tokens`` is an integer tensor."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(tokens).__name__}.")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(
            f"{name} must hold token ids in an integer dtype, got {tokens.dtype}; "
            f"convert with .long()."
        )


def require_mask_like(name: str, mask: Tensor, like_name: str, like: Tensor) -> None:
    """Raise unless ``mask`` is a bool or real-valued tensor of the shape of ``like``."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}.")
    if mask.is_complex():
        raise TypeError(f"{name} must be bool, integer or floating point, got {mask.dtype}.")
    require_same_shape(name, mask, like_name, like)


def require_same_shape(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Raise ``ValueError`` unless both tensors have one shape."""
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} must have the shape of {like_name}, {tuple(like.shape)}, "
            f"got {tuple(tensor.shape)}."
        )
