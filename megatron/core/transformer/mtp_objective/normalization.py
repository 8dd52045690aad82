"""How much each target of each depth weighs.

With CE_k(t) depth k's token cross-entropy, m_k its mask, f = ``mtp_loss_scaling_factor``, D =
``mtp_num_layers``, N_k = Σ m_k and N_0 the sum of the unshifted mask, both over the microbatch and the
context-parallel (CP) group, one rank contributes (to be summed over its tokens)

    mean mode                 f/D · cp · m_k CE_k / max(N_k, 1)      cp cancels DDP's mean over CP ranks
    per-token loss            f/D · (N_0 / max(N_k, 1)) · m_k CE_k   finalize_model_grads divides by Σ N_0
    "global", per-token loss  f/D · m_k CE_k
    mtp_loss_normalizer = n   f/D · m_k CE_k / n_k                   nothing else applied

The first two are upstream's at CP=1, in the same order of operations. ``mtp_depth_weights``, if
there are any, multiply every row of the table.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Optional, Union

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.checks import require_condition
from megatron.core.transformer.mtp_objective.targets import MASK_MODES, DepthTargets

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

Normalizer = Union[Tensor, float, int]
NORMALIZATIONS = ("microbatch", "global")


def check_normalization_config(config: TransformerConfig) -> None:
    """Raise ``ValueError`` for an unknown mask mode or normalization."""
    for name, known in (
        ("mtp_loss_mask_mode", MASK_MODES),
        ("mtp_loss_normalization", NORMALIZATIONS),
    ):
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}.")


def require_normalizer(normalizer: Optional[Normalizer], config: TransformerConfig) -> None:
    """Refuse a normalizer that is not positive, one value or one per depth, or that is missing.

    Args:
        normalizer: number or floating/integer tensor with 1 or ``mtp_num_layers`` elements, > 0.
        config: the model's configuration.

    Raises:
        TypeError: neither a number nor a real tensor.
        ValueError: wrong number of elements, not finite, ≤ 0, or None where
            ``mtp_loss_normalization="global"`` needs one (mean mode).
    """
    if normalizer is None:
        if config.mtp_loss_normalization == "global" and not config.calculate_per_token_loss:
            raise ValueError(
                "mtp_loss_normalization='global' without calculate_per_token_loss needs "
                "mtp_loss_normalizer: pass the number of supervised targets of the global batch "
                "(one value, or one per depth) to forward, or set calculate_per_token_loss=True."
            )
        return
    depths = config.mtp_num_layers
    if isinstance(normalizer, Tensor):
        if normalizer.is_complex() or normalizer.dtype == torch.bool:
            raise TypeError(
                f"mtp_loss_normalizer must be a real number or tensor, got {normalizer.dtype}."
            )
        if normalizer.numel() not in (1, depths) or normalizer.dim() > 1:
            raise ValueError(
                f"mtp_loss_normalizer must hold one value or one per MTP depth ({depths}), "
                f"got shape {tuple(normalizer.shape)}."
            )
        require_condition(
            ((normalizer > 0) & (normalizer < math.inf)).all(),
            "mtp_loss_normalizer must be finite and greater than zero, got {shown}: "
            "pass a count of targets; clamp it to 1 where a batch has none.",
            normalizer,
        )
    elif isinstance(normalizer, numbers.Real) and not isinstance(normalizer, bool):
        if not 0 < normalizer < math.inf:
            raise ValueError(
                f"mtp_loss_normalizer must be finite and greater than zero, got {normalizer}: "
                f"pass a count of targets; clamp it to 1 where a batch has none."
            )
    else:
        raise TypeError(
            f"mtp_loss_normalizer must be a number or a tensor, got {type(normalizer).__name__}."
        )


def normalize_depth_loss(
    masked_loss_BS: Tensor,
    depth: int,
    targets: DepthTargets,
    config: TransformerConfig,
    normalizer: Optional[Normalizer] = None,
) -> Tensor:
    """Weigh one depth's masked token losses as the module's table says.

    Args:
        masked_loss_BS: m_k CE_k, [b, s] floating point.
        depth: k - 1.
        targets: counts of this microbatch.
        config: scaling factor, depths, per-token loss and normalization.
        normalizer: the caller's denominator, checked by ``require_normalizer``.

    Returns:
        [b, s]; its sum is this rank's contribution to the objective.
    """
    scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
    # A field of a later patch.
    if getattr(config, "mtp_depth_weights", None) is not None:
        scale = scale * config.mtp_depth_weights[depth]
    if normalizer is not None:
        if isinstance(normalizer, Tensor):
            normalizer = normalizer.detach().to(masked_loss_BS.device).flatten()
            normalizer = normalizer[depth if normalizer.numel() > 1 else 0]
        return scale * masked_loss_BS / normalizer
    if config.mtp_loss_normalization == "global":
        return scale * masked_loss_BS
    num_targets = targets.num_targets_D[depth].clamp(min=1)
    if config.calculate_per_token_loss:
        return scale * masked_loss_BS * (targets.num_tokens / num_targets)
    return scale * targets.cp_size * masked_loss_BS / num_targets
