"""What each MTP depth is scored against, and how many targets there are.

Shape suffixes: B batch rows, S local positions (all of them at CP=1), D depths.

Labels and masks are prediction-aligned: ``loss_mask[b, t]`` says whether predicting ``labels[b, t]``
at position t counts. Depth k at position t is scored against ``labels[t + k]`` with
``loss_mask[t + k]``, inside the same sequence. Without labels, upstream's rule: labels are the next
``input_ids``, and the mask is aligned with those ids and moves along.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective.checks import (
    require_mask_like,
    require_same_shape,
    require_token_ids,
)
from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.shift import shift_and_sum

IGNORED_LABEL = -100
"""A label that is never a target, as in ``torch.nn.functional.cross_entropy``."""

MASK_MODES = ("target", "path")


@dataclass(frozen=True)
class DepthTargets:
    """Labels and masks of every depth with the counts that weigh them.

    Attributes:
        labels_DBS: per depth, [b, s] in the labels' dtype; 0 wherever nothing is supervised.
        mask_BS: the unshifted mask, [b, s] in the caller's dtype.
        masks_DBS: per depth, the same shifted.
        num_tokens: sum of the unshifted mask over the microbatch and the CP group (N_0).
        num_targets_D: per depth, the sum of its mask over the same (N_k). Sums have the mask's
            dtype, but of 16-bit masks float32, in which counts are exact up to 2^24.
        cp_size: ranks that share each sequence.
    """

    labels_DBS: list[Tensor]
    mask_BS: Tensor
    masks_DBS: list[Tensor]
    num_tokens: Tensor
    num_targets_D: list[Tensor]
    cp_size: int


def depth_targets(
    labels: Optional[Tensor],
    loss_mask: Optional[Tensor],
    input_ids: Optional[Tensor],
    num_depths: int,
    mask_mode: str = "target",
    packed_seq_params: Optional[PackedSeqParams] = None,
    cp_group: Optional[torch.distributed.ProcessGroup] = None,
) -> Optional[DepthTargets]:
    """Shift labels and mask to every depth in one exchange and count them over the CP group.

    Args:
        labels: int [b, s], prediction-aligned; -100 is never a target. None: the next token of
            ``input_ids``, with ``loss_mask`` moved along (upstream's rule without labels).
        loss_mask: [b, s], bool or number, weight of each target. None: every label that is not
            -100.
        input_ids: int [b, s]; None is allowed when labels are given.
        num_depths: D ≥ 1.
        mask_mode: one of ``MASK_MODES``. "target": depth k at t counts if target t + k does;
            "path": only if all of t … t + k do.
        packed_seq_params: boundaries of packed sequences.
        cp_group: context-parallel group that shares the sequences.

    Returns:
        The targets, or None when there are neither labels nor input_ids.

    Raises:
        TypeError: labels that are not integers, a mask that is not real-valued.
        ValueError: shapes that differ, an unknown mask mode, lengths that context parallelism
            cannot split.
    """
    fields = target_fields(labels, loss_mask, input_ids, mask_mode)
    if fields is None:
        return None
    layout = SequenceLayout.of(fields.labels_BS, packed_seq_params, cp_group)
    return shift_targets(fields, num_depths, mask_mode, layout)[0]


@dataclass(frozen=True)
class TargetFields:
    """Labels and mask as they are shifted.

    Attributes:
        labels_BS: int [b, s].
        mask_BS: [b, s] in the caller's dtype, 0 where the label is -100.
        first_shift: of the unshifted mask: 0, or 1 where ``input_ids`` take the place of labels.
    """

    labels_BS: Tensor
    mask_BS: Tensor
    first_shift: int


def target_fields(
    labels: Optional[Tensor],
    loss_mask: Optional[Tensor],
    input_ids: Optional[Tensor],
    mask_mode: str = "target",
) -> Optional[TargetFields]:
    """Check a call's labels and mask; arguments, errors and None as for `depth_targets`."""
    if mask_mode not in MASK_MODES:
        raise ValueError(
            f"mtp_loss_mask_mode must be one of {', '.join(MASK_MODES)}, got {mask_mode!r}."
        )
    derived = labels is None
    if derived:
        if input_ids is None:
            return None
        labels = input_ids
    else:
        require_token_ids("labels", labels)
        if input_ids is not None:
            require_same_shape("labels", labels, "input_ids", input_ids)
    if loss_mask is None:
        loss_mask = torch.ones_like(labels)
    else:
        require_mask_like("loss_mask", loss_mask, "input_ids" if derived else "labels", labels)
    if not derived:
        loss_mask = loss_mask.masked_fill(labels == IGNORED_LABEL, 0)
    return TargetFields(labels, loss_mask, 1 if derived else 0)


def shift_targets(
    fields: TargetFields,
    num_depths: int,
    mask_mode: str,
    layout: SequenceLayout,
    others: Sequence[Tensor] = (),
) -> tuple[DepthTargets, list[list[Tensor]]]:
    """Shift and count targets, and other fields in the same exchange.

    Args:
        fields: what `target_fields` returned.
        num_depths: D ≥ 1.
        mask_mode: see `depth_targets`. "path" costs a second message under context parallelism:
            its counts are no sums of one field.
        layout: of the fields.
        others: [..., s], see `shift_fields`.

    Returns:
        The targets, and per depth the other fields, shifted by 1, …, D.
    """
    outside_T = layout.position_T >= layout.length_N[layout.sequence_T]
    mask_BS = fields.mask_BS.masked_fill(outside_T, 0)
    shifts = range(fields.first_shift, fields.first_shift + num_depths + 1)
    shifted, counts = shift_and_sum([mask_BS, fields.labels_BS, *others], shifts, layout)
    masks = [values[0] for values in shifted]
    if mask_mode == "path":
        masks = _whole_path(masks)
        counts = torch.stack([mask.sum(dtype=counts.dtype) for mask in masks])
        if layout.cp_group is not None:
            torch.distributed.all_reduce(counts, group=layout.cp_group)
    labels_D = [
        values[1].masked_fill(mask == 0, 0) for values, mask in zip(shifted[1:], masks[1:])
    ]
    targets = DepthTargets(
        labels_D, masks[0], masks[1:], counts[0], list(counts[1:]), layout.cp_size
    )
    return targets, [shifted[k - fields.first_shift][2:] for k in range(1, num_depths + 1)]


def _whole_path(masks: list[Tensor]) -> list[Tensor]:
    """Drop a target unless every nearer one of the same position counts too."""
    kept = [masks[0]]
    supervised = masks[0] != 0
    for mask in masks[1:]:
        supervised = supervised & (mask != 0)
        kept.append(mask.masked_fill(~supervised, 0))
    return kept
