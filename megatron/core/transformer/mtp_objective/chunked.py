"""The objective without logits of the whole sequence: supervised rows only, chunk by chunk.

Shape suffixes: D depths, S positions, B batch rows, R = s · b rows of one depth (position-major, as the
hidden states lie in memory), N rows of a chunk, V this rank's part of the vocabulary, H hidden size.

The objective is Σ_d Σ_r w_d(r) · CE_d(r). Its gradient is linear in the one number that backward
brings, so it is computed on the way forward, while a chunk's logits exist, and multiplied in backward.
What stays between the two is what autograd needs anyway: one gradient like the hidden states of each
depth, and one like the weight if that is trained. Everything else has the size of a chunk, and there is
one chunk at a time.

Weights are divided by a power of two near the largest, which backward multiplies back in: exact, and a
gradient that is stored in half precision neither vanishes nor overflows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator, Optional, Sequence

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.chunk_scorer import CrossEntropy, Scorer
from megatron.core.transformer.mtp_objective.chunk_workspace import (
    ChunkWorkspace,
    Head,
    Rows,
    put_rows,
    take_rows,
)


@dataclass(frozen=True)
class DepthRows:
    """What the rows of one depth are scored against.

    Attributes:
        labels_BS: int [b, s]; read where the weight is not 0.
        weights_BS: real [b, s], factor of each row's cross-entropy; 0 where it does not count.
        count: rows that count, known on the host; None where it cannot be (CUDA-graph capture):
            then every row is projected.
        counts_BS: bool [b, s], which rows count; None: those whose weight is not 0. A row that
            counts with weight 0 is scored all the same.
    """

    labels_BS: Tensor
    weights_BS: Tensor
    count: Optional[int]
    counts_BS: Optional[Tensor] = None


def chunked_cross_entropy(
    hidden_DSBH: Sequence[Tensor],
    depths: Sequence[DepthRows],
    head: Head,
    scorer: Optional[Scorer] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted cross-entropy of all depths, with its gradient made on the way.

    Args:
        hidden_DSBH: per depth, [s, b, h], or [s / tp, b, h] under sequence parallelism, in the
            dtype of the weight. The cross-entropy is computed in float32, of float64 in float64.
        depths: labels and weights of each depth, of all s positions.
        head: output layer and how to use it; a weight that requires no gradient is not trained.
        scorer: puts another loss in place of the cross-entropy.

    Returns:
        The objective, a scalar that backward may pass once; and without gradient the
        cross-entropies [d, b, s] and whether the most likely token is the label, bool [d, b, s],
        both 0 where the weight is 0.

    Raises:
        RuntimeError: in backward, if it comes a second time.
    """
    scorer = CrossEntropy() if scorer is None else scorer
    return _ChunkedCrossEntropy.apply(head, tuple(depths), scorer, head.weight_VH, *hidden_DSBH)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """`chunked_cross_entropy`. The weight and the hidden states are arguments for autograd."""

    @staticmethod
    def forward(
        ctx, head: Head, depths: tuple[DepthRows, ...], scorer: Scorer, weight_VH, *hidden_DSBH
    ):
        """Losses, and the gradients of everything that requires one."""
        dtype = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        unit = _power_of_two([depth.weights_BS for depth in depths], dtype)
        largest = max(_rows_to_project(depth) for depth in depths)
        rows = min(head.chunk_size, largest)
        trains_weight = largest > 0 and ctx.needs_input_grad[3]
        workspace = ChunkWorkspace(head, rows, dtype, trains_weight)
        scorer.start(head, rows, dtype)
        passes = [
            _DepthPass(number, depth, hidden_SBH, workspace, scorer, unit, needed)
            for number, (depth, hidden_SBH, needed) in enumerate(
                zip(depths, hidden_DSBH, ctx.needs_input_grad[4:])
            )
        ]
        workspace.wait()
        ctx.head, ctx.unit = head, unit
        ctx.main_grad = getattr(weight_VH, "main_grad", None) if head.fuse_weight_gradient else None
        ctx.gradients = workspace.weight_gradient_VH, [one.gradient_SBH for one in passes]
        losses_DBS = torch.stack([one.token_major(one.loss_R) for one in passes])
        right_DBS = torch.stack([one.token_major(one.right_R) for one in passes])
        ctx.mark_non_differentiable(losses_DBS, right_DBS)
        return torch.stack([one.objective for one in passes]).sum(), losses_DBS, right_DBS

    @staticmethod
    def backward(ctx, grad_objective: Tensor, *unused):
        """The gradients of forward, times what comes in."""
        if ctx.gradients is None:
            raise RuntimeError(
                "The MTP objective with mtp_loss_chunk_size > 0, or with the policy as teacher, "
                "computes its gradient once, in forward, and backward came a second time: call "
                "forward again instead of backward(retain_graph=True), or set "
                "mtp_loss_chunk_size=0 and use no teacher."
            )
        weight_gradient_VH, hidden_gradients = ctx.gradients
        ctx.gradients = None
        # Of one dimension: a number without any takes the gradients' own dtype on a GPU, which would
        # round it, or overflow float16, before it multiplies.
        scale = (ctx.unit * grad_objective).view(1)
        for gradient_SBH in hidden_gradients:
            if gradient_SBH is not None:
                gradient_SBH.mul_(scale)
        if weight_gradient_VH is not None:
            weight_gradient_VH = _weight_gradient(
                weight_gradient_VH.mul_(scale), ctx.head.weight_VH, ctx.main_grad
            )
        return None, None, None, weight_gradient_VH, *hidden_gradients


class _DepthPass:
    """Forward and gradient of one depth.

    Attributes:
        objective: Σ_r w(r) · loss of r, a scalar.
        loss_R, right_R: see `chunked_cross_entropy`.
        gradient_SBH: like the hidden states, divided by ``unit``; None without rows that count.
    """

    def __init__(self, number, depth, hidden_SBH, workspace, scorer, unit, needs_gradient):
        self._number, self._depth, self._scorer = number, depth, scorer
        weights_R = _position_major(depth.weights_BS).to(unit.dtype)
        self._weights_R = scorer.weigh(number, weights_R)
        if depth.counts_BS is None:
            self._idle_R = weights_R == 0
        else:
            self._idle_R = ~_position_major(depth.counts_BS)
        self.loss_R = torch.zeros_like(self._weights_R)
        self.right_R = torch.zeros_like(self._weights_R, dtype=torch.bool)
        self.gradient_SBH = None
        if _rows_to_project(depth) > 0:
            self._run(hidden_SBH, workspace, unit, needs_gradient)
        self.objective = (self.loss_R * self._weights_R).sum()

    def token_major(self, values_R: Tensor) -> Tensor:
        """[b, s] of [s · b]."""
        rows, length = self._depth.weights_BS.shape
        return values_R.view(length, rows).t()

    def _run(self, hidden_SBH, workspace, unit, needs_gradient):
        labels_R = _position_major(self._depth.labels_BS).long()
        hidden_RH = workspace.open_rows(hidden_SBH)
        gradient_RH = None
        if needs_gradient:
            every = _rows_to_project(self._depth) == self._weights_R.numel()
            make = torch.empty_like if every else torch.zeros_like
            gradient_RH = make(hidden_RH, memory_format=torch.contiguous_format)
        for rows in self._chunks(workspace.head.chunk_size):
            weights_N, hidden_NH = take_rows(self._weights_R, rows), take_rows(hidden_RH, rows)
            idle_N = None
            if self._depth.count is None:
                idle_N = take_rows(self._idle_R, rows)
                # 0 times a non-finite loss is NaN, and this row may have one.
                hidden_NH = hidden_NH.masked_fill(idle_N.unsqueeze(-1), 0)
            logits = workspace.project(hidden_NH)
            labels_N = take_rows(labels_R, rows)
            result = self._scorer.score(self._number, rows, logits, labels_N, idle_N)
            scale_N = weights_N / unit / result.sum_N
            workspace.pull_back(logits.values_NV, scale_N, hidden_NH, rows, gradient_RH)
            loss_N, right_N = result.loss_N, result.right_N
            if idle_N is not None:
                loss_N, right_N = loss_N.masked_fill(idle_N, 0), right_N & ~idle_N
            put_rows(self.loss_R, rows, loss_N)
            put_rows(self.right_R, rows, right_N)
        if needs_gradient:
            self.gradient_SBH = workspace.close_rows(gradient_RH, hidden_SBH)

    def _chunks(self, size: int) -> Iterator[Rows]:
        """The rows that count, ``size`` at a time; shapes are known without asking the device."""
        count, total = _rows_to_project(self._depth), self._weights_R.numel()
        order_R = None
        if count < total:
            order_R = torch.argsort(self._idle_R, stable=True)
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            yield rows if order_R is None else order_R[rows]


def _rows_to_project(depth: DepthRows) -> int:
    return depth.weights_BS.numel() if depth.count is None else depth.count


def _position_major(values_BS: Tensor) -> Tensor:
    """[s · b] in the order of hidden states."""
    return values_BS.t().reshape(-1)


def _power_of_two(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A power of two, at most twice the largest weight; 1 if all are 0. A scalar on the device."""
    largest = torch.stack([values.detach().to(dtype).abs().amax() for values in weights]).amax()
    # The power above the largest number that the dtype holds is none that it holds.
    exponent = torch.frexp(largest).exponent.clamp(max=math.frexp(torch.finfo(dtype).max)[1] - 1)
    return torch.ldexp(torch.ones_like(largest), exponent)


def _weight_gradient(
    gradient_VH: Tensor, weight_VH: Tensor, main_grad: Optional[Tensor]
) -> Optional[Tensor]:
    """What backward returns for the weight, after adding to ``main_grad`` if there is one."""
    if main_grad is None:
        return gradient_VH.to(weight_VH.dtype)
    main_grad.add_(gradient_VH)
    if not hasattr(weight_VH, "grad_added_to_main_grad"):
        return None
    # As upstream's layers: a gradient nobody reads makes the hooks of DDP run in this thread.
    weight_VH.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight_VH, "zero_out_wgrad", False) else torch.empty_like
    return make(weight_VH, requires_grad=False)
