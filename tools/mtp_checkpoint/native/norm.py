"""RMSNorm that stores w and applies 1 + w."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.transformer.transformer_config import TransformerConfig


class ZeroCentredRMSNorm(torch.nn.Module):
    """``x / sqrt(mean(x²) + eps) · (1 + w)`` over the last dimension, in float32 at least.

    Checkpoints of the Qwen3.5 and Qwen3-Next families store w. Holding 1 + w instead would lose
    bits of w on import (all of them below 2^-9 in bfloat16, below 2^-24 in float32), so that an
    export could not return the same tensors, and weight decay would pull to 0 instead of 1.
    Upstream's local norm has no such form; Transformer Engine's has, under
    ``layernorm_zero_centered_gamma``, and stores the same w.

    Args:
        config: Of the layer; read for ``params_dtype`` and ``sequence_parallel``.
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        # Read by Megatron's gradient finalisation, as from its other norms.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., hidden_size]; returns its shape and dtype."""
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)
