"""Logits of a few rows, by blocks of columns that stay in a CPU core's cache from pass to pass.

Shape suffixes: N rows of a chunk, V this rank's part of the vocabulary, K blocks, C columns of one.

Elsewhere all columns are one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

_LOG2_E = math.log2(math.e)
_CACHED_LOGITS = 1 << 18  # 2^17 took a little longer, 2^19 half as long again.
_FEWEST_COLUMNS = 256  # Matrix products with fewer are slow.


@dataclass(frozen=True)
class Logits:
    """Logits of the rows of a chunk.

    Attributes:
        values_NV: real [n, v].
        maxima_KN: the largest of each row in each of `column_blocks`; None where nobody has looked.
    """

    values_NV: Tensor
    maxima_KN: Optional[Tensor] = None

    def max(self) -> Tensor:
        """The largest logit of each row, [n]."""
        if self.maxima_KN is None:
            return self.values_NV.amax(dim=-1)
        return self.maxima_KN.amax(dim=0)

    def first_max(self) -> tuple[Tensor, Tensor]:
        """The largest logit of each row and the first column that holds it, as ``max(dim=-1)``.

        A CPU finds maxima without their places several times as fast. With those of blocks known,
        the place is looked for in the first block that has the largest.
        """
        values_NV = self.values_NV
        if self.maxima_KN is None:
            return values_NV.max(dim=-1)
        columns = block_columns(values_NV)
        max_N, block_N = self.maxima_KN.max(dim=0)
        columns_C = torch.arange(columns, device=values_NV.device)
        columns_NC = (block_N * columns).unsqueeze(-1) + columns_C
        columns_NC.clamp_(max=values_NV.size(-1) - 1)  # The last block may be shorter.
        place_N1 = values_NV.gather(-1, columns_NC).argmax(dim=-1, keepdim=True)
        return max_N, columns_NC.gather(-1, place_N1).squeeze(-1)


def block_columns(values_NV: Tensor) -> int:
    """Columns of a block of such logits; the last one may have fewer."""
    rows, columns = values_NV.shape
    if values_NV.device.type != "cpu":
        return columns
    return min(columns, max(_FEWEST_COLUMNS, _CACHED_LOGITS // max(1, rows)))


def column_blocks(values_NV: Tensor) -> tuple[Tensor, ...]:
    """Views of all columns, block by block."""
    return values_NV.split(block_columns(values_NV), dim=-1)


def exponential(values: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """e to the values, in ``out`` (which may be the values) or a new tensor.

    A power of two takes some CPUs half the time.
    """
    if values.device.type != "cpu":
        return torch.exp(values, out=out)
    return torch.mul(values, _LOG2_E, out=out).exp2_()
