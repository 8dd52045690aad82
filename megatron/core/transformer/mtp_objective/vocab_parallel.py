"""Cross-entropy of a few rows over a vocabulary that tensor-parallel (TP) ranks share, in place.

Shape suffixes: N rows of a chunk, V this rank's part of the vocabulary, P tensor-parallel ranks.

With the logits z of a row, their maximum m, S = Σ_v exp(z_v - m) over the whole vocabulary and the
label y:  CE = log S - (z_y - m)  and  S · dCE/dz_v = exp(z_v - m) - S · [v = y].  The gradient is left
multiplied by S: dividing [n, v] numbers by it is a pass over memory that dividing the few rows of a
matrix product afterwards saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.chunk_logits import Logits, column_blocks, exponential

ProcessGroup = torch.distributed.ProcessGroup


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
    logits_NV = logits.values_NV
    found = find_maxima(logits, labels_N, tp_group)
    sum_N = _exponentiate(logits_NV, found.max_N)
    label_logit_N, right_N = found.label_logit_N, found.right_N
    if tp_group is not None and tp_group.size() > 1:
        sums = torch.stack([sum_N, label_logit_N, right_N.to(sum_N.dtype)])
        torch.distributed.all_reduce(sums, group=tp_group)
        sum_N, label_logit_N, right_N = sums[0], sums[1], sums[2] > 0
    subtract_at_labels(logits_NV, sum_N, found.label)
    return RowLosses(sum_N.log() - label_logit_N, right_N, sum_N)


@dataclass(frozen=True)
class RowMaxima:
    """What the largest logits of rows say.

    Attributes:
        max_N: the largest of each row over the whole vocabulary.
        also_N: the same of other logits, where they were given.
        right_N: bool, whether this rank holds the most likely token and that is the label.
        label: where the labels are among this rank's columns.
        label_logit_N: z_y - m, 0 where another rank has y.
    """

    max_N: Tensor
    also_N: Optional[Tensor]
    right_N: Tensor
    label: LocalLabels
    label_logit_N: Tensor


def find_maxima(
    logits: Logits,
    labels_N: Tensor,
    tp_group: Optional[ProcessGroup] = None,
    also_N: Optional[Tensor] = None,
) -> RowMaxima:
    """The largest logits over the vocabulary, and those of the labels; one collective.

    Args:
        logits, labels_N, tp_group: see `cross_entropy_in_place`.
        also_N: of other logits, the largest of this rank's.
    """
    max_N, argmax_N = logits.first_max()
    offset, owner_N = 0, 0
    ranks = 1 if tp_group is None else tp_group.size()
    rank = 0 if ranks == 1 else tp_group.rank()
    if ranks > 1:
        local = max_N.unsqueeze(0) if also_N is None else torch.stack([max_N, also_N])
        every = local.new_empty((ranks, *local.shape))
        torch.distributed.all_gather_into_tensor(every.flatten(), local.flatten(), group=tp_group)
        max_N, owner_N = every[:, 0].max(dim=0)
        also_N = None if also_N is None else every[:, 1].amax(dim=0)
        offset = rank * logits.values_NV.size(-1)
    label = LocalLabels.of(labels_N, offset, logits.values_NV.size(-1))
    label_logit_N = logits.values_NV.gather(-1, label.column_N1).squeeze(-1) - max_N
    return RowMaxima(
        max_N,
        also_N,
        (argmax_N + offset == labels_N) & (owner_N == rank),
        label,
        label_logit_N.masked_fill(label.outside_N, 0),
    )


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


def _exponentiate(logits_NV: Tensor, max_N: Tensor) -> Tensor:
    """exp(z - m) in place; returns its sum over the columns, [n]."""
    max_N1, sum_N = max_N.unsqueeze(-1), torch.zeros_like(max_N)
    for block_NC in column_blocks(logits_NV):
        # Not with the factor of `exponential` in one pass: that rounds z and m before they cancel.
        sum_N += exponential(block_NC.sub_(max_N1), out=block_NC).sum(dim=-1)
    return sum_N


def subtract_at_labels(gradient_NV: Tensor, sum_N: Tensor, label: LocalLabels) -> None:
    """Subtract S in the label's column."""
    at_label_N = sum_N.masked_fill(label.outside_N, 0).neg()
    gradient_NV.scatter_add_(-1, label.column_N1, at_label_N.unsqueeze(-1))
