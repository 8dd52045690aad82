"""How far a head is from the policy, of a few rows over a shared vocabulary, in place.

Shape suffixes: N rows of a chunk, V this rank's part of the vocabulary, P tensor-parallel ranks.

The policy is the teacher. With its logits u and the head's z of the same predicted token, the
rollout's temperature T and what it drops (top-k, top-p),

    p = softmax(u / T) over the tokens that are kept, 0 elsewhere        q = softmax(z / T)
    kl = Σ_v p_v (log p_v - log q_v)         dkl/dz_v = (q_v - p_v) / T
    tv = 1 - a,  a = Σ_v min(p_v, q_v)       dtv/dz_v = -q_v ([q_v < p_v] - Σ_u [q_u < p_u] q_u) / T

a is the probability that rejection sampling (Leviathan et al., 2023, arXiv 2211.17192) accepts a
draft drawn from q where p is to be sampled. The cross-entropy of a label beside it is taken at T =
1.

Like `vocab_parallel.cross_entropy_in_place`, this leaves gradients multiplied by a number per row,
by which a few rows of a matrix product are divided more cheaply. Both exponentials are kept in
units of the head's sum S: exp((z_v - max z) / T) = S q_v, and beside it S p_v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.chunk_logits import Logits
from megatron.core.transformer.mtp_objective.sampling import TeacherSampling, dropped_tokens
from megatron.core.transformer.mtp_objective.vocab_parallel import (
    LocalLabels,
    subtract_at_labels,
)

ProcessGroup = torch.distributed.ProcessGroup

_CACHED_LOGITS = 1 << 19  # Of each of the two; the fastest of 2^17 to 2^22 at 32K columns.


@dataclass(frozen=True)
class Divergence:
    """What of a row is trained: CE, ``weight`` · kl or tv, or the sum of both.

    Attributes:
        with_labels: whether the cross-entropy is part of it.
        kind: "kl", "tv"; None trains the cross-entropy and only measures a.
        weight: λ ≥ 0.
        sampling: temperature, top-k and top-p of the rollout.
    """

    with_labels: bool
    kind: Optional[str]
    weight: float
    sampling: TeacherSampling


@dataclass(frozen=True)
class RowScores:
    """What became of the rows of a chunk, each [n].

    Attributes:
        loss_N: what is trained.
        right_N: bool, whether the head's most likely token (the first of several) is the label.
        sum_N: by what the gradient must be divided.
        accepted_N: a = Σ_v min(p_v, q_v).
    """

    loss_N: Tensor
    right_N: Tensor
    sum_N: Tensor
    accepted_N: Tensor


def score_in_place(
    logits_NV: Tensor,
    teacher_NV: Tensor,
    labels_N: Tensor,
    divergence: Divergence,
    tp_group: Optional[ProcessGroup] = None,
) -> RowScores:
    """Replace logits by the gradient of what is trained, times a number per row; see the module.

    Args:
        logits_NV: float32 or float64 [n, v] of the head, overwritten by the gradient.
        teacher_NV: the same of the policy, overwritten by nothing of use.
        labels_N: int64 [n], ids of the whole vocabulary.
        divergence: what is trained.
        tp_group: ranks that share the vocabulary, in rank order; None or size 1 for none. Three
            collectives of a few numbers per row (four for "tv"), and those of `dropped_tokens`.
    """
    if tp_group is not None and tp_group.size() > 1:
        return _score(logits_NV, teacher_NV, labels_N, divergence, tp_group)
    if logits_NV.device.type != "cpu":
        return _score(logits_NV, teacher_NV, labels_N, divergence, None)
    # A CPU is done sooner if a block of rows stays in its cache from the first pass to the last.
    size = max(1, _CACHED_LOGITS // logits_NV.size(-1))
    parts = [part.split(size) for part in (logits_NV, teacher_NV, labels_N)]
    blocks = [_score(*block, divergence, None) for block in zip(*parts)]
    names = ("loss_N", "right_N", "sum_N", "accepted_N")
    return RowScores(*(torch.cat([getattr(block, name) for block in blocks]) for name in names))


def _score(
    logits_NV: Tensor,
    teacher_NV: Tensor,
    labels_N: Tensor,
    divergence: Divergence,
    tp_group: Optional[ProcessGroup],
) -> RowScores:
    """`score_in_place` of rows that are worked on together."""
    temperature, with_labels = divergence.sampling.temperature, divergence.with_labels
    label, right_N = _subtract_maxima(logits_NV, teacher_NV, labels_N, tp_group)
    sums = dict(right=right_N.to(logits_NV.dtype))
    exact_NV = None
    if with_labels:
        label_logit_N = logits_NV.gather(-1, label.column_N1).squeeze(-1)
        sums["label_logit"] = label_logit_N.masked_fill(label.outside_N, 0)
    if temperature != 1:
        if with_labels:
            exact_NV = logits_NV.exp()
            sums["exact"] = exact_NV.sum(dim=-1)
        logits_NV.div_(temperature)
        teacher_NV.div_(temperature)
    dropped_NV = dropped_tokens(teacher_NV, divergence.sampling, tp_group)
    keeps_logits = divergence.kind == "kl"
    teacher_exp_NV = teacher_NV.exp() if keeps_logits else teacher_NV.exp_()
    if dropped_NV is not None:
        teacher_exp_NV.masked_fill_(dropped_NV, 0)
    if keeps_logits:
        sums["log_ratio"] = teacher_NV.sub_(logits_NV).mul_(teacher_exp_NV).sum(dim=-1)
    sums["head"] = logits_NV.exp_().sum(dim=-1)
    sums["teacher"] = teacher_exp_NV.sum(dim=-1)
    sums = _sum_over(sums, tp_group)
    sum_N = sums["head"]
    # From here on in units of the head's sum S.
    difference_NV = torch.mul(teacher_exp_NV, _column(sum_N / sums["teacher"]), out=teacher_NV)
    difference_NV.sub_(logits_NV)
    del teacher_exp_NV
    tv_N = _half_distance(difference_NV, tp_group) / sum_N
    accepted_N = (1 - tv_N).clamp(min=0)
    loss_N = divergence.weight * _divergence_of(divergence.kind, sums, tv_N)
    if divergence.kind == "tv":
        _negative_tv_gradient(difference_NV, logits_NV, sum_N, tp_group)
    if not with_labels:
        torch.mul(difference_NV, -divergence.weight, out=logits_NV)
        return RowScores(loss_N, sums["right"] > 0, sum_N * temperature, accepted_N)
    if exact_NV is not None:
        logits_NV.copy_(exact_NV.mul_(_column(sum_N / sums["exact"])))
    subtract_at_labels(logits_NV, sum_N, label)
    if divergence.kind is not None:
        logits_NV.sub_(difference_NV, alpha=divergence.weight / temperature)
    cross_entropy_N = sums.get("exact", sum_N).log() - sums["label_logit"]
    return RowScores(loss_N + cross_entropy_N, sums["right"] > 0, sum_N, accepted_N)


def _subtract_maxima(
    logits_NV: Tensor, teacher_NV: Tensor, labels_N: Tensor, tp_group: Optional[ProcessGroup]
) -> tuple[LocalLabels, Tensor]:
    """Subtract each row's maximum over the whole vocabulary from both, in place.

    Returns:
        Where the labels are, and bool [n], whether this rank holds the head's most likely token
        and that is the label.
    """
    max_N, argmax_N = Logits(logits_NV).first_max()
    teacher_max_N = teacher_NV.amax(dim=-1)
    offset, is_owner_N = 0, True
    if tp_group is not None:
        local_2N = torch.stack([max_N, teacher_max_N])
        all_P2N = local_2N.new_empty((tp_group.size(), *local_2N.shape))
        torch.distributed.all_gather_into_tensor(
            all_P2N.flatten(), local_2N.flatten(), group=tp_group
        )
        max_N, owner_N = all_P2N[:, 0].max(dim=0)
        teacher_max_N = all_P2N[:, 1].amax(dim=0)
        offset, is_owner_N = tp_group.rank() * logits_NV.size(-1), owner_N == tp_group.rank()
    logits_NV.sub_(_column(max_N))
    teacher_NV.sub_(_column(teacher_max_N))
    label = LocalLabels.of(labels_N, offset, logits_NV.size(-1))
    return label, (argmax_N + offset == labels_N) & is_owner_N


def _half_distance(difference_NV: Tensor, tp_group: Optional[ProcessGroup]) -> Tensor:
    """Σ |p - q| / 2 = 1 - Σ min(p, q), [n], in the unit of the difference."""
    distance_N = torch.linalg.vector_norm(difference_NV, ord=1, dim=-1)
    if tp_group is not None:
        torch.distributed.all_reduce(distance_N, group=tp_group)
    return distance_N / 2


def _divergence_of(kind: Optional[str], sums: dict[str, Tensor], tv_N: Tensor) -> Tensor:
    """kl or tv of each row, [n]; 0 of neither."""
    if kind == "kl":
        log_sums_N = sums["head"].log() - sums["teacher"].log()
        return sums["log_ratio"] / sums["teacher"] + log_sums_N
    return tv_N if kind == "tv" else torch.zeros_like(tv_N)


def _negative_tv_gradient(
    difference_NV: Tensor, head_NV: Tensor, sum_N: Tensor, tp_group: Optional[ProcessGroup]
) -> None:
    """Replace S (p - q) by -T S · dtv/dz, of S q in ``head_NV``."""
    below_NV = difference_NV.gt_(0).mul_(head_NV)  # S q where q < p
    below_N = below_NV.sum(dim=-1)
    if tp_group is not None:
        torch.distributed.all_reduce(below_N, group=tp_group)
    below_NV.addcmul_(head_NV, _column(below_N / sum_N), value=-1)


def _sum_over(sums: dict[str, Tensor], tp_group: Optional[ProcessGroup]) -> dict[str, Tensor]:
    """Numbers of each row [n], summed over the ranks in one message."""
    if tp_group is None:
        return sums
    total = torch.stack(list(sums.values()))
    torch.distributed.all_reduce(total, group=tp_group)
    return dict(zip(sums, total))


def _column(values_N: Tensor) -> Tensor:
    return values_N.unsqueeze(-1)
