"""What every depth of one microbatch reads and is scored against, from one exchange.

Shape suffixes: B batch rows, S positions of this context-parallel rank, D depths.

The plan is made where a model's forward starts. Depth k reads the ids, positions and padding mask of
t + k; its labels and mask are those of t + k, too. All of them are shifted together: one message per
microbatch under context parallelism, whatever the number of fields, depths and sequences. With
``mtp_loss_mask_mode="path"`` its counts cost a second one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective.host_counts import HostCounts
from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.options import MTPOptions
from megatron.core.transformer.mtp_objective.padding import (
    gather_padding_mask,
    scatter_padding_mask,
)
from megatron.core.transformer.mtp_objective.shift import shift_fields
from megatron.core.transformer.mtp_objective.targets import (
    DepthTargets,
    shift_targets,
    target_fields,
)

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

ProcessGroup = torch.distributed.ProcessGroup


@dataclass(frozen=True)
class DepthInputs:
    """What one depth reads.

    Attributes:
        input_ids, position_ids: [b, s] (positions as given), shifted; None where there are none.
        padding_mask: bool [b, s], shifted, of all positions also under sequence parallelism.
    """

    input_ids: Optional[Tensor]
    position_ids: Optional[Tensor]
    padding_mask: Optional[Tensor]

    def padding_mask_like(
        self, padding_mask: Optional[Tensor], tp_group: ProcessGroup
    ) -> Optional[Tensor]:
        """The shifted mask in the shape of the depth before, which may be a rank's part of it."""
        if padding_mask is None:
            return None
        return scatter_padding_mask(self.padding_mask, padding_mask.size(-1), tp_group)


@dataclass(frozen=True)
class DepthPlan:
    """See the module.

    Attributes:
        inputs_D: per depth; empty on a stage without heads.
        targets: None on a stage without the loss, or where there is nothing to score against.
        counts: this rank's supervised rows per depth, on their way to the host; with ``targets``.
    """

    inputs_D: tuple[DepthInputs, ...] = ()
    targets: Optional[DepthTargets] = None
    counts: Optional[HostCounts] = None


def plan_inputs(
    num_depths: int,
    input_ids: Optional[Tensor],
    position_ids: Optional[Tensor],
    padding_mask: Optional[Tensor] = None,
    packed_seq_params: Optional[PackedSeqParams] = None,
    cp_group: Optional[ProcessGroup] = None,
    tp_group: Optional[ProcessGroup] = None,
) -> tuple[DepthInputs, ...]:
    """The inputs alone, for a caller without a plan of the whole microbatch.

    Args:
        num_depths: D ≥ 1.
        input_ids: int [b, s].
        position_ids: [..., s].
        padding_mask: bool [b, s], or this rank's [b, s / tp].
        packed_seq_params: boundaries of packed sequences.
        cp_group: context-parallel group that shares the sequences.
        tp_group: tensor-parallel group, for a padding mask spread over it.
    """
    fields = _InputFields.of(input_ids, position_ids, padding_mask, packed_seq_params, tp_group)
    if not fields.tensors:
        return (DepthInputs(None, None, None),) * num_depths
    layout = SequenceLayout.of(fields.tensors[0], packed_seq_params, cp_group)
    shifted = shift_fields(fields.tensors, range(1, num_depths + 1), layout)
    return tuple(fields.named(tensors) for tensors in shifted)


def plan_microbatch(
    model: LanguageModule,
    options: MTPOptions,
    *,
    input_ids: Optional[Tensor],
    position_ids: Optional[Tensor],
    labels: Optional[Tensor],
    loss_mask: Optional[Tensor],
    padding_mask: Optional[Tensor],
    packed_seq_params: Optional[PackedSeqParams],
) -> MTPOptions:
    """Add the plan to the options of a forward call, on a stage with heads or with the loss.

    Args:
        model: GPTModel or HybridModel.
        options: of the call; returned as they are where MTP is not active or not on this stage.
        input_ids, position_ids, labels, loss_mask: [b, s] as given to forward.
        padding_mask: bool [b, s] as given to forward.
        packed_seq_params: boundaries of packed sequences.

    Raises:
        TypeError, ValueError: see `depth_targets`.
    """
    if not options.active or not (model.mtp_process or model.post_process):
        return options
    depths, config, groups = model.config.mtp_num_layers, model.config, model.pg_collection
    targets = None
    if model.post_process:
        targets = target_fields(labels, loss_mask, input_ids, config.mtp_loss_mask_mode)
    if not model.mtp_process:
        input_ids = position_ids = padding_mask = None
    if targets is None:
        inputs_D = plan_inputs(
            depths, input_ids, position_ids, padding_mask, packed_seq_params, groups.cp, groups.tp
        )
        return dataclasses.replace(options, plan=DepthPlan(inputs_D))
    fields = _InputFields.of(
        input_ids, position_ids, padding_mask, packed_seq_params, groups.tp, labels
    )
    layout = SequenceLayout.of(targets.labels_BS, packed_seq_params, groups.cp)
    shifted_targets, shifted = shift_targets(
        targets, depths, config.mtp_loss_mask_mode, layout, fields.tensors
    )
    inputs_D = tuple(fields.named(tensors) for tensors in shifted) if model.mtp_process else ()
    plan = DepthPlan(inputs_D, shifted_targets, HostCounts(shifted_targets.masks_DBS))
    return dataclasses.replace(options, plan=plan)


@dataclass(frozen=True)
class _InputFields:
    """The inputs there are, in the form that is shifted: a shift brings in zeros.

    Attributes:
        names, tensors: alike in length; "padding_mask" may be inverted.
        inverted: behind the end of a padded sequence lies padding, so that zeros must mean it.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    inverted: bool

    @classmethod
    def of(
        cls, input_ids, position_ids, padding_mask, packed_seq_params, tp_group, labels=None
    ) -> _InputFields:
        inverted = (
            packed_seq_params is not None and packed_seq_params.cu_seqlens_q_padded is not None
        )
        if padding_mask is not None:
            # Sequence parallelism may have spread it over the tensor-parallel ranks, unlike the ids.
            length = _length(input_ids, labels, position_ids, padding_mask)
            padding_mask = gather_padding_mask(padding_mask, length, tp_group)
            padding_mask = ~padding_mask if inverted else padding_mask
        given = dict(input_ids=input_ids, position_ids=position_ids, padding_mask=padding_mask)
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        return cls(tuple(given), tuple(given.values()), inverted)

    def named(self, shifted) -> DepthInputs:
        """One depth's inputs of its shifted tensors."""
        fields = dict.fromkeys(("input_ids", "position_ids", "padding_mask"))
        fields.update(zip(self.names, shifted, strict=True))
        if fields["padding_mask"] is not None and self.inverted:
            fields["padding_mask"] = ~fields["padding_mask"]
        return DepthInputs(**fields)


def _length(*fields: Optional[Tensor]) -> int:
    """Positions of the first field there is: ids may be missing where embeddings were given."""
    return next(field.size(-1) for field in fields if field is not None)
