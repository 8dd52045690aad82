"""Cross-entropy of a few rows over a vocabulary that tensor-parallel (TP) ranks share, in place.

Shape suffixes: N rows of a chunk, V this rank's part of the vocabulary, P tensor-parallel ranks.

With the logits z of a row, their maximum m, S = Σ_v exp(z_v - m) over the whole vocabulary and the
label y:  CE = log S - (z_y - m)  and  S · dCE/dz_v = exp(z_v - m) - S · [v = y].  The gradient is left
multiplied by S: dividing [n, v] numbers by it is a pass over memory that dividing the few rows of a
matrix product afterwards saves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.chunk_logits import Logits, column_blocks

ProcessGroup = torch.distributed.ProcessGroup

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class RowLosses:
    """What became of the rows of a chunk.

    Attributes:
        loss_N: cross-entropy, in the dtype of the logits.
        right_N: bool, whether the most likely token (the first of several) is the label.
        sum_N: S, by which the gradient must be divided.
    """

    loss_N: Tensor
    right_N: Tensor
    sum_N: Tensor


def cross_entropy_in_place(
    logits: Logits, labels_N: Tensor, tp_group: Optional[ProcessGroup] = None
) -> RowLosses:
    """Replace logits by the gradient of the cross-entropy, times S; see the module.

    Args:
        logits: float32 or float64, overwritten.
        labels_N: int64 [n], ids of the whole vocabulary. One that no rank holds counts as a logit
            equal to the largest, as upstream's cross-entropy does.
        tp_group: ranks that share the vocabulary, in rank order; None or size 1 for none. Two
            collectives of 1 and 3 numbers per row.
    """
    if tp_group is not None and tp_group.size() > 1:
        return _shared_vocabulary(logits, labels_N, tp_group)
    return _whole_vocabulary(logits, labels_N)


def _whole_vocabulary(logits: Logits, labels_N: Tensor) -> RowLosses:
    """`cross_entropy_in_place` on one rank."""
    logits_NV, (max_N, argmax_N) = logits.values_NV, logits.first_max()
    label = LocalLabels.of(labels_N, 0, logits_NV.size(-1))
    sum_N, label_logit_N = _exponentiate(logits_NV, max_N, label)
    subtract_at_labels(logits_NV, sum_N, label)
    return RowLosses(sum_N.log() - label_logit_N, argmax_N == labels_N, sum_N)


def _shared_vocabulary(logits: Logits, labels_N: Tensor, tp_group: ProcessGroup) -> RowLosses:
    """`cross_entropy_in_place` on one of several ranks."""
    logits_NV, (local_max_N, local_argmax_N) = logits.values_NV, logits.first_max()
    max_PN = local_max_N.new_empty((tp_group.size(), *local_max_N.shape))
    torch.distributed.all_gather_into_tensor(max_PN.flatten(), local_max_N, group=tp_group)
    max_N, owner_N = max_PN.max(dim=0)
    offset = tp_group.rank() * logits_NV.size(-1)
    right_N = (owner_N == tp_group.rank()) & (local_argmax_N + offset == labels_N)
    label = LocalLabels.of(labels_N, offset, logits_NV.size(-1))
    sum_N, label_logit_N = _exponentiate(logits_NV, max_N, label)
    sums = torch.stack([sum_N, label_logit_N, right_N.to(sum_N.dtype)])
    torch.distributed.all_reduce(sums, group=tp_group)
    sum_N, label_logit_N, right_N = sums[0], sums[1], sums[2] > 0
    subtract_at_labels(logits_NV, sum_N, label)
    return RowLosses(sum_N.log() - label_logit_N, right_N, sum_N)


@dataclass(frozen=True)
class LocalLabels:
    """Labels as columns of this rank's logits: int64 [n, 1], and bool [n] where there is none."""

    column_N1: Tensor
    outside_N: Tensor

    @classmethod
    def of(cls, labels_N: Tensor, offset: int, size: int) -> LocalLabels:
        column_N = labels_N - offset
        outside_N = (column_N < 0) | (column_N >= size)
        return cls(column_N.masked_fill(outside_N, 0).unsqueeze(-1), outside_N)


def _exponentiate(logits_NV: Tensor, max_N: Tensor, label: LocalLabels) -> tuple[Tensor, Tensor]:
    """exp(z - m) in place; returns its sum over the columns and z_y - m, 0 where y is outside."""
    label_logit_N = logits_NV.gather(-1, label.column_N1).squeeze(-1) - max_N
    # A power of two takes some CPUs half the time, and its factor none.
    on_cpu, sum_N = logits_NV.device.type == "cpu", torch.zeros_like(max_N)
    shift_N1 = -_LOG2_E * max_N.unsqueeze(-1)
    for block_NC in column_blocks(logits_NV):
        if on_cpu:
            torch.add(shift_N1, block_NC, alpha=_LOG2_E, out=block_NC).exp2_()
        else:
            block_NC.sub_(max_N.unsqueeze(-1)).exp_()
        sum_N += block_NC.sum(dim=-1)
    return sum_N, label_logit_N.masked_fill(label.outside_N, 0)


def subtract_at_labels(gradient_NV: Tensor, sum_N: Tensor, label: LocalLabels) -> None:
    """Subtract S in the label's column."""
    at_label_N = sum_N.masked_fill(label.outside_N, 0).neg()
    gradient_NV.scatter_add_(-1, label.column_N1, at_label_N.unsqueeze(-1))
