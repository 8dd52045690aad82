"""Cross-entropy of a few rows over a vocabulary that tensor-parallel (TP) ranks share, in place.

Shape suffixes: N rows of a chunk, V this rank's part of the vocabulary, P tensor-parallel ranks.

With the logits z of a row, their maximum m, S = Σ_v exp(z_v - m) over the whole vocabulary and the
label y:  CE = log S - (z_y - m)  and  S · dCE/dz_v = exp(z_v - m) - S · [v = y].  The gradient is left
multiplied by S: dividing [n, v] numbers by it is a pass over memory that dividing the few rows of a
matrix product afterwards saves.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

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
    logits_NV: Tensor, labels_N: Tensor, tp_group: Optional[ProcessGroup] = None
) -> RowLosses:
    """Replace logits by the gradient of the cross-entropy, times S; see the module.

    Args:
        logits_NV: float32 or float64 [n, v], overwritten.
        labels_N: int64 [n], ids of the whole vocabulary. One that no rank holds counts as a logit
            equal to the largest, as upstream's cross-entropy does.
        tp_group: ranks that share the vocabulary, in rank order; None or size 1 for none. Two
            collectives of 1 and 3 numbers per row.
    """
    shared = tp_group is not None and tp_group.size() > 1
    local_max_N, local_argmax_N = logits_NV.max(dim=-1)
    if shared:
        offset = tp_group.rank() * logits_NV.size(-1)
        max_PN = local_max_N.new_empty((tp_group.size(), *local_max_N.shape))
        torch.distributed.all_gather_into_tensor(max_PN.flatten(), local_max_N, group=tp_group)
        max_N, owner_N = max_PN.max(dim=0)
        owns_N = owner_N == tp_group.rank()
    else:
        offset, max_N, owns_N = 0, local_max_N, None
    local_N = labels_N - offset
    outside_N = (local_N < 0) | (local_N >= logits_NV.size(-1))
    right_N = (local_argmax_N == local_N) if owns_N is None else (local_argmax_N == local_N) & owns_N
    index_N1 = local_N.masked_fill(outside_N, 0).unsqueeze(-1)

    logits_NV.sub_(max_N.unsqueeze(-1))
    label_logit_N = logits_NV.gather(-1, index_N1).squeeze(-1).masked_fill(outside_N, 0)
    sum_N = logits_NV.exp_().sum(dim=-1)
    if shared:
        sums = torch.stack([sum_N, label_logit_N, right_N.to(sum_N.dtype)])
        torch.distributed.all_reduce(sums, group=tp_group)
        sum_N, label_logit_N, right_N = sums[0], sums[1], sums[2] > 0
    at_label_N1 = sum_N.masked_fill(outside_N, 0).neg().unsqueeze(-1)
    logits_NV.scatter_add_(-1, index_N1, at_label_N1)
    return RowLosses(sum_N.log() - label_logit_N, right_N, sum_N)
