"""The output layer applied to a few rows at a time, forward and backward, in buffers used again.

Shape suffixes: R rows of one depth (position-major), N rows of a chunk, V this rank's part of the
vocabulary, H hidden size.

Half precision goes through both matrix products as it does in upstream's output layer: logits and
their gradient are rounded to it, softmax and cross-entropy are not. The weight's gradient adds up over
chunks in single precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.chunk_logits import (
    Logits,
    block_columns,
    column_blocks,
)

ProcessGroup = torch.distributed.ProcessGroup
Rows = Union[slice, Tensor]
"""Rows of a depth: a range, or int64 [n] positions."""

_VOCAB_BLOCK = 16384  # Vocabulary rows of the weight's gradient made at a time in half precision.


@dataclass(frozen=True)
class Head:
    """The output layer, and how many rows of it may exist at once.

    Attributes:
        weight_VH: this rank's rows of the output weight.
        chunk_size: rows of logits, ≥ 1.
        tp_group: ranks that share the vocabulary; None for none.
        sequence_parallel: the ranks of ``tp_group`` share the positions of hidden states, too.
        logit_scale: factor of the logits.
        fuse_weight_gradient: add to ``weight_VH.main_grad`` if there is one, as upstream's output
            layer does under ``gradient_accumulation_fusion``.
    """

    weight_VH: Tensor
    chunk_size: int
    tp_group: Optional[ProcessGroup] = None
    sequence_parallel: bool = False
    logit_scale: float = 1.0
    fuse_weight_gradient: bool = False

    @property
    def tp_size(self) -> int:
        """Ranks that share the vocabulary."""
        return 1 if self.tp_group is None else self.tp_group.size()


class ChunkWorkspace:
    """Buffers and matrix products of one forward pass of the objective.

    Attributes:
        weight_gradient_VH: sum over all chunks so far, in the dtype of the cross-entropy; None if
            the weight is not trained.
    """

    def __init__(self, head: Head, rows: int, dtype: torch.dtype, trains_weight: bool):
        """Allocate for chunks of up to ``rows`` rows; ``dtype`` is that of the cross-entropy."""
        self.head = head
        weight = head.weight_VH
        self._half_NV = None
        if weight.dtype != dtype:
            self._half_NV = weight.new_empty((rows, weight.size(0)))
        if self._half_NV is None and weight.device.type == "cpu":
            # Matrix products are faster by a fifth with the rows of a column side by side.
            self._logits_NV = weight.new_empty((weight.size(0), rows)).t()
        else:
            self._logits_NV = weight.new_empty((rows, weight.size(0)), dtype=dtype)
        self.weight_gradient_VH = None
        if trains_weight:
            self.weight_gradient_VH = torch.zeros_like(
                weight, dtype=dtype, memory_format=torch.contiguous_format
            )
        self._handles: list[torch.distributed.Work] = []

    def open_rows(self, hidden_SBH: Tensor) -> Tensor:
        """All rows of a depth, [r, h]: under sequence parallelism those of the group, gathered."""
        local_RH = hidden_SBH.reshape(-1, hidden_SBH.size(-1))
        if not self.head.sequence_parallel or self.head.tp_size == 1:
            return local_RH
        all_RH = local_RH.new_empty((self.head.tp_size * local_RH.size(0), local_RH.size(1)))
        torch.distributed.all_gather_into_tensor(
            all_RH, local_RH.contiguous(), group=self.head.tp_group
        )
        return all_RH

    def close_rows(self, gradient_RH: Tensor, like_SBH: Tensor) -> Tensor:
        """Start to sum a depth's gradient over the ranks; it is complete after `wait`."""
        if self.head.tp_size == 1:
            return gradient_RH.view_as(like_SBH)
        if not self.head.sequence_parallel:
            self._handles.append(
                torch.distributed.all_reduce(gradient_RH, group=self.head.tp_group, async_op=True)
            )
            return gradient_RH.view_as(like_SBH)
        mine_SBH = torch.empty_like(like_SBH, memory_format=torch.contiguous_format)
        work = torch.distributed.reduce_scatter_tensor(
            mine_SBH.view(-1, mine_SBH.size(-1)),
            gradient_RH,
            group=self.head.tp_group,
            async_op=True,
        )
        self._handles.append(work)
        return mine_SBH

    def wait(self) -> None:
        """Wait for what `close_rows` has started."""
        while self._handles:
            self._handles.pop().wait()

    def project(self, hidden_NH: Tensor) -> Logits:
        """Logits of some rows in the buffer, which the next call overwrites."""
        logits_NV, weight_VH = self._logits_NV[: hidden_NH.size(0)], self.head.weight_VH
        columns, maxima = block_columns(logits_NV), []
        sources = weight_VH.split(columns)
        if self._half_NV is not None:
            half_NV = self._half_NV[: hidden_NH.size(0)]
            sources = self._multiply_into(half_NV, hidden_NH, weight_VH).split(columns, dim=-1)
        for block_NC, source in zip(column_blocks(logits_NV), sources):
            if self._half_NV is not None:
                block_NC.copy_(source)
            else:
                self._multiply_into(block_NC, hidden_NH, source)
            if logits_NV.device.type == "cpu":
                maxima.append(block_NC.amax(dim=-1))  # while the block is in the cache
        return Logits(logits_NV, torch.stack(maxima) if maxima else None)

    def _multiply_into(self, logits_NC: Tensor, hidden_NH: Tensor, weight_CH: Tensor) -> Tensor:
        torch.mm(hidden_NH, weight_CH.t(), out=logits_NC)
        return logits_NC if self.head.logit_scale == 1 else logits_NC.mul_(self.head.logit_scale)

    def pull_back(
        self,
        gradient_NV: Tensor,
        scale_N: Tensor,
        hidden_NH: Tensor,
        rows: Rows,
        hidden_gradient_RH: Optional[Tensor],
    ) -> None:
        """Turn the gradient of a chunk's logits into those of hidden states and weight.

        Args:
            gradient_NV: what is in the buffer of `project`, to be multiplied by ``scale_N``.
            scale_N: factor of each row.
            hidden_NH: the rows that were projected.
            rows: where they come from.
            hidden_gradient_RH: where their gradient goes; None if nobody wants it.
        """
        if self.head.logit_scale != 1:
            scale_N = scale_N * self.head.logit_scale
        scale_N1 = scale_N.unsqueeze(-1)
        if self._half_NV is None:
            # Few numbers instead of many are scaled where that does not round them twice.
            wants_hidden = hidden_gradient_RH is not None
            sum_NH = self._multiply(gradient_NV, hidden_NH * scale_N1, wants_hidden)
            if sum_NH is not None:
                put_rows(hidden_gradient_RH, rows, sum_NH.mul_(scale_N1))
            return
        half_NV = self._half_NV[: gradient_NV.size(0)]
        torch.mul(gradient_NV, scale_N1, out=half_NV)
        if hidden_gradient_RH is not None:
            put_rows(hidden_gradient_RH, rows, torch.mm(half_NV, self.head.weight_VH))
        if self.weight_gradient_VH is None:
            return
        if half_NV.is_cuda:
            self._add_half_products(half_NV, hidden_NH)
        else:
            self.weight_gradient_VH.addmm_(gradient_NV.t(), hidden_NH * scale_N1)

    def _multiply(
        self, gradient_NV: Tensor, scaled_NH: Tensor, wants_hidden: bool
    ) -> Optional[Tensor]:
        """Add to the weight's gradient, and return that of hidden states before it is scaled.

        Both products are made of a block while it is in the cache; one alone is faster whole.
        """
        weight_VH, total_VH = self.head.weight_VH, self.weight_gradient_VH
        in_blocks = wants_hidden and total_VH is not None
        columns = block_columns(gradient_NV) if in_blocks else weight_VH.size(0)
        sum_NH = torch.zeros_like(scaled_NH) if wants_hidden else None
        for start in range(0, weight_VH.size(0), columns):
            block = slice(start, start + columns)
            if sum_NH is not None:
                sum_NH.addmm_(gradient_NV[:, block], weight_VH[block])
            if total_VH is not None:
                total_VH[block].addmm_(gradient_NV[:, block].t(), scaled_NH)
        return sum_NH

    def _add_half_products(self, half_NV: Tensor, hidden_NH: Tensor) -> None:
        """Products of half-precision numbers, summed in single precision by the matrix unit."""
        for start in range(0, half_NV.size(1), _VOCAB_BLOCK):
            block = slice(start, start + _VOCAB_BLOCK)
            self.weight_gradient_VH[block] += torch.mm(
                half_NV[:, block].t(), hidden_NH, out_dtype=self.weight_gradient_VH.dtype
            )


def take_rows(tensor: Tensor, rows: Rows) -> Tensor:
    """Some rows: a view of a range, a copy of listed ones."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def put_rows(tensor: Tensor, rows: Rows, values: Tensor) -> None:
    """The opposite of `take_rows`."""
    if isinstance(rows, slice):
        tensor[rows] = values
    else:
        tensor.index_copy_(0, rows, values)
