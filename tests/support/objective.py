"""The MTP objective written out in plain torch and lists, and gradients to compare with it."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
import torch.nn.functional as F

from tests.support.batches import Batch
from tests.support.device import device
from tests.support.gradients import grads_by_name
from tests.support.rows import look_ahead


def reference_targets(batch: Batch, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and mask of one depth of a whole batch, [b, s] each; depth 0 is the batch's own."""
    return _look_ahead(batch, batch.labels, depth), _look_ahead(batch, batch.loss_mask, depth)


def reference_objective(
    logits_DSBV: Sequence[torch.Tensor],
    batch: Batch,
    config: Any,
    normalizer: Sequence[float] | None = None,
) -> torch.Tensor:
    """What one rank that holds the whole batch adds to its loss: a scalar, float64.

    Args:
        logits_DSBV: Per depth, [s, b, v].
        batch: A whole batch with labels and mask.
        config: ``mtp_loss_scaling_factor``, ``calculate_per_token_loss`` and
            ``mtp_loss_normalization`` are read.
        normalizer: One denominator per depth instead of the configured one.
    """
    num_tokens = batch.loss_mask.double().sum()
    scale = config.mtp_loss_scaling_factor / len(logits_DSBV)
    total = torch.zeros((), dtype=torch.float64, device=device())
    for depth, logits_SBV in enumerate(logits_DSBV, start=1):
        labels_BS, mask_BS = reference_targets(batch, depth)
        loss_BS = F.cross_entropy(
            logits_SBV.permute(1, 2, 0).double(), labels_BS, reduction="none"
        )
        summed = (loss_BS * mask_BS.double()).sum()
        targets = mask_BS.double().sum().clamp(min=1)
        if normalizer is not None:
            weight = 1 / normalizer[depth - 1]
        elif config.mtp_loss_normalization == "global":
            weight = 1.0
        elif config.calculate_per_token_loss:
            weight = num_tokens / targets
        else:
            weight = 1 / targets
        total = total + scale * weight * summed
    return total


def step_gradients(
    model: torch.nn.Module, batch: Batch | None, main_weight: float = 0.0, **forward: Any
) -> dict[str, torch.Tensor]:
    """Gradients of every parameter after one forward and backward.

    The loss is the model's output, weighted with fixed random numbers, times ``main_weight``: with
    0 only the MTP objective trains. Equal weights would hide a leak, because the sum over a
    normalised row has almost no gradient.

    Args:
        model: A GPTModel or HybridModel.
        batch: This rank's part; None when ``forward`` holds everything.
        main_weight: Factor of the main loss.
        forward: Replaces or adds arguments of the model's forward.
    """
    model.zero_grad(set_to_none=True)
    given = {} if batch is None else batch.forward_kwargs()
    output = model(**{**given, **forward})
    generator = torch.Generator().manual_seed(99)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    (main_weight * output * weights.to(output)).sum().backward()
    return grads_by_name(model)


def nonzero(gradients: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of the gradients that are not exactly zero everywhere; NaN is not zero."""
    return {name for name, gradient in gradients.items() if (gradient != 0).any()}


def _look_ahead(batch: Batch, field_BS: torch.Tensor, depth: int) -> torch.Tensor:
    length = field_BS.size(1)
    bounds = [(0, length)]
    if batch.cu_seqlens is not None:
        lengths = [b - a for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:])]
        bounds = list(zip(batch.boundaries, lengths))
    rows = [look_ahead(row, depth, bounds) for row in field_BS.tolist()]
    return torch.tensor(rows, dtype=field_BS.dtype, device=field_BS.device)
