"""How far a head is from the policy, of a few rows over a shared vocabulary, in place.

Shape suffixes: N rows of a chunk, V this rank's part of the vocabulary, P tensor-parallel ranks.

The policy is the teacher. With its logits u and the head's z of the same predicted token, the
rollout's temperature T and what it drops (top-k, top-p),

    p = softmax(u / T) over the tokens that are kept, 0 elsewhere        q = softmax(z / T)
    kl = Σ_v p_v (log p_v - log q_v)         dkl/dz_v = (q_v - p_v) / T
    tv = 1 - a,  a = Σ_v min(p_v, q_v)       dtv/dz_v = -q_v ([q_v < p_v] - Σ_u [q_u < p_u] q_u) / T

a is the probability that rejection sampling (Leviathan et al., 2023, arXiv 2211.17192) accepts a
draft drawn from q where p is to be sampled. A label's cross-entropy beside it is taken at T = 1.

Like `vocab_parallel.cross_entropy_in_place`, this leaves gradients multiplied by a number per row,
by which a few rows of a matrix product are divided more cheaply. Both exponentials are kept in
units of the head's sum S: exp((z_v - max z) / T) = S q_v, and beside it S p_v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Optional

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.chunk_logits import (
    Logits,
    block_columns,
    column_blocks,
    exponential,
)
from megatron.core.transformer.mtp_objective.sampling import TeacherSampling, dropped_tokens
from megatron.core.transformer.mtp_objective.vocab_parallel import (
    LocalLabels,
    RowLosses,
    find_maxima,
    subtract_at_labels,
)

ProcessGroup = torch.distributed.ProcessGroup


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
class RowScores(RowLosses):
    """`RowLosses` of what is trained, and a = Σ_v min(p_v, q_v), [n]."""

    accepted_N: Tensor


def score_in_place(
    head: Logits,
    teacher: Logits,
    labels_N: Tensor,
    divergence: Divergence,
    tp_group: Optional[ProcessGroup] = None,
) -> RowScores:
    """Replace the head's logits by the gradient of what is trained, times a number per row.

    Args:
        head: float32 or float64 [n, v], overwritten by the gradient; see the module.
        teacher: the same of the policy, overwritten by nothing of use.
        labels_N: int64 [n], ids of the whole vocabulary.
        divergence: what is trained.
        tp_group: ranks that share the vocabulary, in rank order; None or size 1 for none. Three
            collectives of a few numbers per row, and those of `dropped_tokens`.
    """
    if tp_group is not None and tp_group.size() == 1:
        tp_group = None
    return _Scoring(head, teacher, divergence, tp_group).run(labels_N)


class _Scoring:
    """`score_in_place`, pass by pass; on a CPU a pass goes over `column_blocks`."""

    def __init__(
        self,
        head: Logits,
        teacher: Logits,
        divergence: Divergence,
        tp_group: Optional[ProcessGroup],
    ):
        self._head, self._teacher = head, teacher
        self._divergence, self._tp_group = divergence, tp_group
        self._temperature = divergence.sampling.temperature
        # The cross-entropy's own exponentials, where the temperature makes the others differ.
        self._exact_NV = None
        if divergence.with_labels and self._temperature != 1:
            self._exact_NV = torch.empty_like(head.values_NV)
        self._spare_NC: Optional[Tensor] = None
        self._sums: dict[str, Tensor] = {}

    def run(self, labels_N: Tensor) -> RowScores:
        """Every pass."""
        divergence, temperature = self._divergence, self._temperature
        label = self._find_maxima(labels_N)
        self._exponentiate(self._drop())
        self._sum_over_ranks("right", "label_logit", "exact", "log_ratio", "head", "teacher")
        self._subtract()
        self._sum_over_ranks("positive", "below")
        sums, sum_N = self._sums, self._sums["head"]
        tv_N = sums["positive"] / sum_N
        if divergence.kind == "tv":
            self._replace_by_tv()
        loss_N, right_N = divergence.weight * self._divergence_of(tv_N), sums["right"] > 0
        accepted_N = (1 - tv_N).clamp(min=0)
        if not divergence.with_labels:
            return RowScores(loss_N, right_N, sum_N * temperature, accepted_N)
        subtract_at_labels(self._head.values_NV, sum_N, label)
        loss_N = loss_N + sums.get("exact", sum_N).log() - sums["label_logit"]
        return RowScores(loss_N, right_N, sum_N, accepted_N)

    def _find_maxima(self, labels_N: Tensor) -> LocalLabels:
        """Maxima over the whole vocabulary, and the labels' logits; returns where labels are."""
        found = find_maxima(self._head, labels_N, self._tp_group, self._teacher.max())
        self._max_N1, self._teacher_max_N1 = _column(found.max_N), _column(found.also_N)
        self._add("right", found.right_N.to(found.max_N.dtype))
        if self._divergence.with_labels:
            self._add("label_logit", found.label_logit_N)
        return found.label

    def _drop(self) -> Optional[Tensor]:
        """Which tokens the rollout drops, bool [n, v], from the teacher's logits; None for none."""
        sampling, values_NV = self._divergence.sampling, self._teacher.values_NV
        if not sampling.drops:
            return None
        values_NV.sub_(self._teacher_max_N1)  # Before the division, which would round both.
        if self._temperature != 1:
            values_NV.div_(self._temperature)
        return dropped_tokens(values_NV, sampling, self._tp_group)

    def _exponentiate(self, dropped_NV: Optional[Tensor]) -> None:
        """Put both exponentials in the place of the logits, and sum over them."""
        if self._divergence.kind == "kl" or self._head.values_NV.device.type == "cpu":
            # After `_drop`, whose sort takes memory of its own.
            self._spare_NC = torch.empty_like(column_blocks(self._head.values_NV)[0])
        for head_NC, teacher_NC, spare_NC, exact_NC, dropped_NC in self._blocks(dropped_NV):
            if dropped_NC is None:  # else `_drop` has done this
                teacher_NC.sub_(self._teacher_max_N1)
                if self._temperature != 1:
                    teacher_NC.div_(self._temperature)
            head_NC.sub_(self._max_N1)
            if exact_NC is not None:
                self._add("exact", exponential(head_NC, out=exact_NC).sum(dim=-1))
            if self._temperature != 1:
                head_NC.div_(self._temperature)
            if self._divergence.kind == "kl":
                torch.sub(teacher_NC, head_NC, out=spare_NC)
            exponential(teacher_NC, out=teacher_NC)
            if dropped_NC is not None:
                teacher_NC.masked_fill_(dropped_NC, 0)
            if self._divergence.kind == "kl":
                self._add("log_ratio", spare_NC.mul_(teacher_NC).sum(dim=-1))
            self._add("teacher", teacher_NC.sum(dim=-1))
            self._add("head", exponential(head_NC, out=head_NC).sum(dim=-1))

    def _subtract(self) -> None:
        """Put S (p - q) in the place of the teacher's, and sum over what is positive, S · tv.

        For "tv", what stays there is S q where q < p, summed as well; else this is the last pass.
        """
        ratio_N1 = _column(self._sums["head"] / self._sums["teacher"])
        for head_NC, teacher_NC, spare_NC, exact_NC, _ in self._blocks():
            difference_NC = teacher_NC.mul_(ratio_N1).sub_(head_NC)
            self._add("positive", _positive(difference_NC, spare_NC))
            if self._divergence.kind == "tv":
                self._add("below", difference_NC.gt_(0).mul_(head_NC).sum(dim=-1))
            else:
                self._finish(head_NC, difference_NC, exact_NC)

    def _replace_by_tv(self) -> None:
        """The last pass of "tv": -T S · dtv/dz from S q where q < p, and S q."""
        share_N1 = _column(self._sums["below"] / self._sums["head"])
        for head_NC, below_NC, _, exact_NC, _ in self._blocks():
            below_NC.addcmul_(head_NC, share_N1, value=-1)
            self._finish(head_NC, below_NC, exact_NC)

    def _finish(self, head_NC: Tensor, negative_NC: Tensor, exact_NC: Optional[Tensor]) -> None:
        """Put the gradient, but for the labels' column, in the place of the head's exponentials."""
        divergence = self._divergence
        if not divergence.with_labels:
            torch.mul(negative_NC, -divergence.weight, out=head_NC)
            return
        if exact_NC is not None:
            torch.mul(exact_NC, _column(self._sums["head"] / self._sums["exact"]), out=head_NC)
        if divergence.kind is not None:
            head_NC.sub_(negative_NC, alpha=divergence.weight / self._temperature)

    def _divergence_of(self, tv_N: Tensor) -> Tensor:
        """kl or tv of each row, [n]; 0 of neither."""
        sums = self._sums
        if self._divergence.kind == "kl":
            log_sums_N = sums["head"].log() - sums["teacher"].log()
            return sums["log_ratio"] / sums["teacher"] + log_sums_N
        return tv_N if self._divergence.kind == "tv" else torch.zeros_like(tv_N)

    def _blocks(self, dropped_NV: Optional[Tensor] = None) -> Iterator[tuple]:
        """Blocks of the head, the teacher, spare memory, exact exponentials, what is dropped."""
        whole = self._head.values_NV, self._teacher.values_NV, self._exact_NV, dropped_NV
        columns = block_columns(self._head.values_NV)
        for start in range(0, self._head.values_NV.size(-1), columns):
            head, teacher, exact, dropped = (
                None if one is None else one[:, start : start + columns] for one in whole
            )
            spare = None if self._spare_NC is None else self._spare_NC[:, : head.size(-1)]
            yield head, teacher, spare, exact, dropped

    def _add(self, name: str, values_N: Tensor) -> None:
        self._sums[name] = self._sums[name] + values_N if name in self._sums else values_N

    def _sum_over_ranks(self, *names: str) -> None:
        """Sum those of the numbers that there are over the ranks, in one message."""
        if self._tp_group is None:
            return
        found = [name for name in names if name in self._sums]
        total = torch.stack([self._sums[name] for name in found])
        torch.distributed.all_reduce(total, group=self._tp_group)
        self._sums |= dict(zip(found, total))


def _positive(difference_NC: Tensor, spare_NC: Optional[Tensor]) -> Tensor:
    """Σ max(p - q, 0), [n]; elsewhere than on a CPU Σ |p - q| / 2, the same over all columns.

    That is one pass, but a CPU takes several times as long for a norm.
    """
    if difference_NC.device.type != "cpu":
        return torch.linalg.vector_norm(difference_NC, ord=1, dim=-1) / 2
    return torch.clamp(difference_NC, min=0, out=spare_NC).sum(dim=-1)


def _column(values_N: Tensor) -> Tensor:
    return values_N.unsqueeze(-1)
