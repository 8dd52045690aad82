"""float64 through Megatron's vocabulary-parallel cross entropy."""

from __future__ import annotations

import contextlib
from typing import Iterator

import torch


@contextlib.contextmanager
def fp64_cross_entropy() -> Iterator[None]:
    """Keep float64 logits in float64 inside the context; other dtypes are untouched.

    Upstream casts logits to float32 before the softmax. That leaves an error of about 1e-8 in the
    loss, although far less in gradients compared between two runs; with this, parity tests
    can ask for 1e-12.
    """
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    original = VocabParallelCrossEntropy.calculate_logits_max

    def calculate_logits_max(logits_SBV):
        if logits_SBV.dtype != torch.float64:
            return original(logits_SBV)
        # No copy, as for float32: the caller overwrites the logits, and tests must notice that.
        return logits_SBV, torch.max(logits_SBV, dim=-1)[0]

    VocabParallelCrossEntropy.calculate_logits_max = staticmethod(calculate_logits_max)
    try:
        yield
    finally:
        VocabParallelCrossEntropy.calculate_logits_max = staticmethod(original)
