"""The normalizer that makes the MTP objective weigh targets as a trainer's own loss does.

With m_k depth k's shifted mask, M microbatches over all data-parallel ranks, and R what the summed
gradients are divided by afterwards, ``forward(loss_mask=…, mtp_loss_normalizer=…)`` gets

    weighting         loss_mask                                   normalizer of depth k, times R
    token-mean        as given                                    Σ m_k over the step
    sequence-mean     mask / Σ of the mask of its own sequence    sequences with a target
    microbatch-mean   as given                                    M · Σ m_k over the microbatch

where each sum runs over all context-parallel ranks, those of the step also over the data-parallel
ones. R is 1 where gradients are summed over data- and context-parallel ranks, and their number
where DDP averages them; Megatron's schedules divide by the number of microbatches as well.

Shape suffixes: B batch rows, T local positions, N sequences, D depths.
"""

import math
from dataclasses import dataclass
from typing import Optional, Sequence

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.targets import IGNORED_LABEL, depth_targets

WEIGHTINGS = ("token-mean", "sequence-mean", "microbatch-mean")


@dataclass(frozen=True)
class Targets:
    """What one microbatch is trained on, as ``forward`` takes it.

    Attributes:
        labels: int [b, t], prediction-aligned; -100 is never a target.
        loss_mask: [b, t], weight of each label; None: every label that is not -100.
        packed_seq_params: boundaries, for THD.
    """

    labels: Tensor
    loss_mask: Optional[Tensor] = None
    packed_seq_params: Optional[PackedSeqParams] = None


@dataclass(frozen=True)
class WeighedTargets:
    """Arguments of one microbatch's forward.

    Attributes:
        loss_mask: [b, t] float.
        mtp_loss_normalizer: [d], one denominator per depth.
    """

    loss_mask: Tensor
    mtp_loss_normalizer: Tensor


def weigh_microbatches(
    microbatches: Sequence[Targets],
    weighting: str,
    *,
    num_depths: int,
    mask_mode: str = "target",
    gradient_divisor: float = 1.0,
    cp_group: Optional[torch.distributed.ProcessGroup] = None,
    dp_cp_group: Optional[torch.distributed.ProcessGroup] = None,
) -> list[WeighedTargets]:
    """Masks and normalizers for all microbatches of a training step.

    Every rank of ``dp_cp_group`` must call it with its own microbatches, at least one. It waits
    for nothing on the host.

    Args:
        microbatches: this rank's, in the order of their forwards.
        weighting: one of ``WEIGHTINGS``.
        num_depths: ``mtp_num_layers``.
        mask_mode: ``mtp_loss_mask_mode`` of the config.
        gradient_divisor: R of the module's table.
        cp_group: ranks that share each sequence.
        dp_cp_group: all ranks whose gradients are added up; None: ``cp_group``.

    Raises:
        ValueError: an unknown weighting, no microbatch, a divisor that is not finite and positive,
            or what ``depth_targets`` refuses.
        TypeError: what ``depth_targets`` refuses.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting must be one of {', '.join(WEIGHTINGS)}, got {weighting!r}.")
    if not microbatches:
        raise ValueError("weigh_microbatches needs the targets of at least one microbatch, got 0.")
    if not 0 < gradient_divisor < math.inf:
        raise ValueError(
            f"gradient_divisor must be finite and greater than zero, got {gradient_divisor}: pass "
            f"what the summed gradients are divided by, 1 for nothing."
        )
    dp_cp_group = cp_group if dp_cp_group is None else dp_cp_group
    masks = [_mask_of(batch) for batch in microbatches]
    if weighting == "sequence-mean":
        masks, counts = zip(*(_per_sequence(m, b, cp_group) for m, b in zip(masks, microbatches)))
        total = _sum_over(dp_cp_group, sum(counts))
        steps = [total.expand(num_depths)] * len(masks)
    else:
        sums = torch.stack(
            [
                _local_sums(mask, batch, num_depths, mask_mode, cp_group)
                for mask, batch in zip(masks, microbatches)
            ]
        )
        if weighting == "token-mean":
            steps = [_sum_over(dp_cp_group, sums.sum(dim=0))] * len(masks)
        else:
            ranks = 1 if cp_group is None else cp_group.size()
            number = _sum_over(dp_cp_group, sums.new_full((), len(masks) / ranks))
            steps = list(_sum_over(cp_group, sums).clamp(min=1) * number)
    return [
        WeighedTargets(mask, normalizer.clamp(min=1) / gradient_divisor)
        for mask, normalizer in zip(masks, steps)
    ]


def _mask_of(batch: Targets) -> Tensor:
    """The mask of a microbatch with -100 labels out, float64 of a float64 mask, else float32."""
    mask = torch.ones_like(batch.labels) if batch.loss_mask is None else batch.loss_mask
    dtype = torch.float64 if mask.dtype == torch.float64 else torch.float32
    return mask.to(dtype).masked_fill(batch.labels == IGNORED_LABEL, 0)


def _local_sums(mask, batch, num_depths, mask_mode, cp_group) -> Tensor:
    """Σ m_k of every depth over this rank's tokens, float64 [d]."""
    targets = depth_targets(
        batch.labels, mask, None, num_depths, mask_mode, batch.packed_seq_params, cp_group
    )
    return torch.stack([m.sum(dtype=torch.float64) for m in targets.masks_DBS])


def _per_sequence(mask_BT: Tensor, batch: Targets, cp_group) -> tuple[Tensor, Tensor]:
    """Weights that add up to 1 in each sequence, and the share of its sequences this rank counts.

    The ranks of ``cp_group`` see the same sequences: each counts its part of them.
    """
    layout = SequenceLayout.of(mask_BT, batch.packed_seq_params, cp_group)
    rows = mask_BT.size(0)
    row_B1 = torch.arange(rows, device=mask_BT.device).unsqueeze(-1)
    sequence_BT = layout.sequence_T + row_B1 * layout.length_N.numel()
    inside_T = layout.position_T < layout.length_N[layout.sequence_T]
    mask_BT = mask_BT.masked_fill(~inside_T, 0)
    sums_N = mask_BT.new_zeros(rows * layout.length_N.numel(), dtype=torch.float64)
    sums_N.index_add_(0, sequence_BT.flatten(), mask_BT.flatten().double())
    sums_N = _sum_over(cp_group, sums_N)
    weight_BT = mask_BT / torch.where(sums_N == 0, 1, sums_N)[sequence_BT].to(mask_BT.dtype)
    return weight_BT, (sums_N != 0).sum(dtype=torch.float64) / layout.cp_size


def _sum_over(group: Optional[torch.distributed.ProcessGroup], value: Tensor) -> Tensor:
    if group is not None and group.size() > 1:
        value = value.clone()
        torch.distributed.all_reduce(value, group=group)
    return value
