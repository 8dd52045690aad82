"""Looking ahead in rows: hidden states or embeddings of later tokens, differentiably.

Shape suffixes: S positions this rank holds, B batch rows, H hidden size, N rows of a selection, C
context-parallel ranks, K largest shift, Q sequences. ``shifted[t] = rows[t + k]`` inside the
sequence of ``t`` and zero past its last real token, as `shift_fields` does it for fields of one
number per token.

Under context parallelism only the first K rows of every chunk travel, in one all-gather for all
shifts; their gradients go home in one reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.shift import chunk_heads, source_index


@dataclass(frozen=True)
class ShiftedRows:
    """Rows that can be read up to ``reach`` tokens ahead.

    Attributes:
        rows_SBH: the rows of this rank, as given.
        heads_SBH: [c · q · 2 · k, b, h], the first rows of every chunk of the group; None where
            every sequence is whole on this rank.
        sources_K: for the shifts 1, …, reach, index int64 [s] into the rows followed by the heads,
            and bool [s], whether t + k is a real token of the sequence.
    """

    rows_SBH: Tensor
    heads_SBH: Optional[Tensor]
    sources_K: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, rows_SBH: Tensor, reach: int, layout: SequenceLayout) -> ShiftedRows:
        """Exchange what all shifts need: one all-gather, none without context parallelism.

        Differentiable in ``rows_SBH``. Under context parallelism the gradient's reduce-scatter is
        a collective of the backward pass: if rows require a gradient, either every rank uses
        what it reads here in its loss, or none does.

        Args:
            rows_SBH: [s, b, h] of this context-parallel rank, all of its positions (under
                sequence parallelism gather them first), any dtype; b = 1 for packed sequences.
            reach: the largest shift, ≥ 1.
            layout: where the local tokens sit, of a field [b, s].

        Raises:
            ValueError: ``reach`` below 1, or rows that are not [s, b, h] with the layout's s.
        """
        if reach < 1:
            raise ValueError(f"reach is the largest shift and must be ≥ 1, got {reach}.")
        local = layout.position_T.numel()
        if rows_SBH.dim() != 3 or rows_SBH.size(0) != local:
            raise ValueError(
                f"Rows must be [s, b, h] with the layout's {local} local positions first, got "
                f"{tuple(rows_SBH.shape)}: under sequence parallelism gather them over the "
                f"tensor-parallel ranks first."
            )
        heads_SBH = None
        if layout.cp_group is not None:
            mine_SBH = rows_SBH.index_select(0, chunk_heads(reach, layout))
            heads_SBH = _GatherHeads.apply(mine_SBH, layout.cp_group)
        sources_K = tuple(source_index(k, reach, layout) for k in range(1, reach + 1))
        return cls(rows_SBH, heads_SBH, sources_K)

    def shifted(self, k: int) -> Tensor:
        """The rows k tokens ahead, [s, b, h]; k = 0 gives the rows as they are.

        Raises:
            ValueError: k is not in 0, …, reach.
        """
        self._require_reachable(k)
        if k == 0:
            return self.rows_SBH
        index_S, inside_S = self.sources_K[k - 1]
        rows_SBH = self.rows_SBH
        if self.heads_SBH is not None:
            rows_SBH = torch.cat([rows_SBH, self.heads_SBH])
        return rows_SBH.index_select(0, index_S).masked_fill_(~inside_S[:, None, None], 0)

    def take(self, k: int, index_N: Union[Tensor, slice]) -> Tensor:
        """Some rows of ``shifted(k)``, without making the others.

        Args:
            k: 0, …, reach; 0 takes from the rows as they are.
            index_N: int64 [n], or a slice, into the flat rows: position · b + batch row. Never
                read on the host.

        Returns:
            [n, h]. Its gradient is like all rows, [s, b, h]: take often, and most of backward is
            zeros.

        Raises:
            ValueError: k is not in 0, …, reach.
        """
        self._require_reachable(k)
        length, batch, _ = self.rows_SBH.shape
        if isinstance(index_N, slice):
            wanted = range(length * batch)[index_N]
            index_N = torch.arange(len(wanted), device=self.rows_SBH.device)
            index_N = index_N * wanted.step + wanted.start
        position_N, row_N = index_N // batch, index_N % batch
        if k == 0:
            return self.rows_SBH[position_N, row_N]
        index_S, inside_S = self.sources_K[k - 1]
        source_N, inside_N = index_S[position_N], inside_S[position_N].unsqueeze(-1)
        if self.heads_SBH is None:
            return self.rows_SBH[source_N, row_N].masked_fill_(~inside_N, 0)
        is_head_N = source_N >= length
        own_NH = self.rows_SBH[source_N.masked_fill(is_head_N, 0), row_N]
        head_NH = self.heads_SBH[(source_N - length).clamp(min=0), row_N]
        taken_NH = torch.where(is_head_N.unsqueeze(-1), head_NH, own_NH)
        return taken_NH.masked_fill_(~inside_N, 0)

    def _require_reachable(self, k: int) -> None:
        if not 0 <= k <= len(self.sources_K):
            raise ValueError(
                f"These rows were exchanged for shifts up to {len(self.sources_K)}, got {k}: pass "
                f"a larger reach to ShiftedRows.of."
            )


class _GatherHeads(torch.autograd.Function):
    """All-gather along the first dimension; its gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx, mine_SBH: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        """[c · s, b, h] of [s, b, h], ranks in order."""
        ctx.group = group
        heads_SBH = mine_SBH.new_empty((group.size() * mine_SBH.size(0), *mine_SBH.shape[1:]))
        torch.distributed.all_gather_into_tensor(heads_SBH, mine_SBH.contiguous(), group=group)
        return heads_SBH

    @staticmethod
    def backward(ctx, grad_SBH: Tensor):
        """What all ranks read of this rank's heads, summed."""
        home_SBH = grad_SBH.new_empty((grad_SBH.size(0) // ctx.group.size(), *grad_SBH.shape[1:]))
        torch.distributed.reduce_scatter_tensor(home_SBH, grad_SBH.contiguous(), group=ctx.group)
        return home_SBH, None
