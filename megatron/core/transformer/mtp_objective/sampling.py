"""What a rollout samples from: temperature, top-k, top-p, over a vocabulary that ranks share.

Shape suffixes: N rows of a chunk, V this rank's part of the vocabulary, K largest logits of a row,
P tensor-parallel ranks.

As vLLM's sampler does it: logits are divided by the temperature, top-k comes before top-p, and
probabilities are those of what top-k has left. Equal logits at the boundary of top-k are all kept.
Top-p drops the least likely tokens, one by one, while the dropped ones together hold no more than
1 - p: so the token that crosses p is kept, and of equally likely ones at that boundary those with
the smaller id go first (vLLM leaves that to the order of an unstable sort).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

ProcessGroup = torch.distributed.ProcessGroup

_SORTED = 1 << 24  # Numbers sorted at a time, over the whole vocabulary.


@dataclass(frozen=True)
class TeacherSampling:
    """The sampling parameters of a rollout.

    Attributes:
        temperature: T > 0.
        top_k: tokens that may be sampled; 0 for all.
        top_p: in (0, 1]; 1 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def drops(self) -> bool:
        """Whether it leaves out any token."""
        return self.top_k > 0 or self.top_p < 1


def dropped_tokens(
    logits_NV: Tensor, sampling: TeacherSampling, tp_group: Optional[ProcessGroup] = None
) -> Optional[Tensor]:
    """Which tokens top-k and top-p leave out.

    Top-k gathers each rank's k largest logits, top-p the whole vocabulary of the rows (of some
    at a time, some 30 bytes for each of at most 2^24 numbers in float32): both bounded by the chunk.

    Args:
        logits_NV: [n, v], divided by the temperature already.
        sampling: k may not exceed the whole vocabulary.
        tp_group: ranks that share the vocabulary, in rank order; None or size 1 for none.

    Returns:
        bool [n, v], or None if every token is kept.
    """
    if tp_group is not None and tp_group.size() == 1:
        tp_group = None
    dropped_NV = None
    if sampling.top_k:
        dropped_NV = logits_NV < _kth_largest(logits_NV, sampling.top_k, tp_group).unsqueeze(-1)
    if sampling.top_p == 1:
        return dropped_NV
    ranks = 1 if tp_group is None else tp_group.size()
    rows = max(1, _SORTED // (ranks * logits_NV.size(-1)))
    parts = []
    for start in range(0, logits_NV.size(0), rows):
        part_NV = logits_NV[start : start + rows]
        if dropped_NV is not None:
            part_NV = part_NV.masked_fill(dropped_NV[start : start + rows], float("-inf"))
        parts.append(_outside_top_p(part_NV, sampling.top_p, tp_group))
    return torch.cat(parts)


def _kth_largest(logits_NV: Tensor, k: int, tp_group: Optional[ProcessGroup]) -> Tensor:
    """The k-th largest logit of each row over the whole vocabulary, [n]."""
    largest_NK = logits_NV.topk(min(k, logits_NV.size(-1)), dim=-1).values
    if tp_group is not None:
        largest_NK = _gather_columns(largest_NK, tp_group).topk(k, dim=-1).values
    return largest_NK[:, -1]


def _outside_top_p(logits_NV: Tensor, top_p: float, tp_group: Optional[ProcessGroup]) -> Tensor:
    """bool [n, v], true for what is not among the most likely tokens that hold p."""
    offset, width = 0, logits_NV.size(-1)
    if tp_group is not None:
        logits_NV = _gather_columns(logits_NV, tp_group)
        offset = tp_group.rank() * width
    ascending_NV, order_NV = logits_NV.sort(dim=-1, stable=True)
    mass_NV = ascending_NV.softmax(dim=-1).cumsum(dim=-1)
    outside_NV = mass_NV <= 1 - top_p
    outside_NV[:, -1] = False  # At least one is kept, also where rounding leaves less than p.
    dropped_NV = torch.empty_like(outside_NV).scatter_(-1, order_NV, outside_NV)
    return dropped_NV[:, offset : offset + width]


def _gather_columns(values_NV: Tensor, tp_group: ProcessGroup) -> Tensor:
    """[n, p · v], the ranks' columns in rank order."""
    all_PNV = values_NV.new_empty((tp_group.size(), *values_NV.shape))
    torch.distributed.all_gather_into_tensor(
        all_PNV.flatten(), values_NV.contiguous().flatten(), group=tp_group
    )
    return all_PNV.movedim(0, 1).flatten(1)
