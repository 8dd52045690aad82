"""Heads read the embeddings that a model was given, not those of the ids in their place.

Shape suffixes: S positions of this context-parallel rank, s their part on one tensor-parallel rank
(all of them without sequence parallelism), B batch rows, H hidden size.

A model with an image or audio tower calls the language model with ``decoder_input``: embeddings of
text and features, merged. ``input_ids`` then hold a placeholder wherever there is a feature, and
their embedding says nothing. Depth k at position t reads row t + k of ``decoder_input``, inside the
sequence, and zeros past its end. Learned position embeddings are part of these rows already; they
are those of t + k, as they are when ids are embedded with shifted positions.

Cost: under context parallelism one message more per microbatch, of the first rows of every chunk.
Under sequence parallelism the rows are gathered over the tensor-parallel ranks once, as every layer
does.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Optional

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.options import MTPOptions
from megatron.core.transformer.mtp_objective.plan import DepthInputs, DepthPlan
from megatron.core.transformer.mtp_objective.row_shift import ShiftedRows

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

ProcessGroup = torch.distributed.ProcessGroup


class GivenEmbeddings:
    """``decoder_input`` of one forward call, exchanged when the first depth reads it.

    Args:
        rows_sBH: [s, b, h] as given; without a graph where the objective is isolated.
        num_depths: the largest shift.
        packed_seq_params: boundaries of packed sequences.
        cp_group: context-parallel group that shares the sequences.
        tp_group: ranks that share the positions under sequence parallelism, else None.
    """

    def __init__(
        self,
        rows_sBH: Tensor,
        num_depths: int,
        packed_seq_params: Optional[PackedSeqParams] = None,
        cp_group: Optional[ProcessGroup] = None,
        tp_group: Optional[ProcessGroup] = None,
    ):
        self._given = rows_sBH, num_depths, packed_seq_params, cp_group
        self._tp_group = tp_group
        self.depths_read: set[int] = set()

    def ahead(self, depth: int) -> Tensor:
        """What depth 1, 2, … reads, [s, b, h]."""
        self.depths_read.add(depth)
        if self._tp_group is None:
            return self._rows.shifted(depth)
        local, batch, hidden = self._given[0].shape
        start = self._tp_group.rank() * local * batch
        rows_NH = self._rows.take(depth, slice(start, start + local * batch))
        return rows_NH.view(local, batch, hidden)

    @functools.cached_property
    def _rows(self) -> ShiftedRows:
        rows_SBH, num_depths, packed_seq_params, cp_group = self._given
        if self._tp_group is not None:
            # Each rank reads rows for its own positions: gradients are summed on their way back.
            rows_SBH = gather_from_sequence_parallel_region(
                rows_SBH, tensor_parallel_output_grad=True, group=self._tp_group
            )
        layout = SequenceLayout.of(rows_SBH[..., 0].t(), packed_seq_params, cp_group)
        return ShiftedRows.of(rows_SBH, num_depths, layout)


@dataclass(frozen=True)
class GivenInputs(DepthInputs):
    """What one depth reads when its embeddings were given.

    Attributes:
        embeddings: those of the call.
        depth: 1, 2, …
    """

    embeddings: GivenEmbeddings
    depth: int


def plan_given_embeddings(
    model: LanguageModule,
    options: MTPOptions,
    decoder_input: Optional[Tensor],
    input_ids: Optional[Tensor],
    labels: Optional[Tensor],
    packed_seq_params: Optional[PackedSeqParams],
    overlapped: bool = False,
) -> MTPOptions:
    """Let the depths of a plan read ``decoder_input``, where a forward call was given one.

    Args:
        model: GPTModel or HybridModel.
        options: of the call, with its plan; returned as they are without ``decoder_input``, and
            where heads do not run or, without a plan, are not trained.
        decoder_input: [s, b, h] as given to forward.
        input_ids, labels: [b, S] as given to forward; ids may be None, they are not embedded.
        packed_seq_params: boundaries of packed sequences.
        overlapped: whether a schedule plan runs the call.

    Raises:
        ValueError: the heads are on another pipeline stage, which cannot know ``decoder_input``; a
            shape that is not that of ids or labels; nothing to score heads against; or, in
            a schedule plan, embeddings that would be trained from two nodes.
    """
    if decoder_input is None:
        return options
    _require_heads_here(model, options)
    if not options.active or not model.mtp_process:
        return options
    groups, config = model.pg_collection, model.config
    tp_group = groups.tp if config.sequence_parallel and groups.tp.size() > 1 else None
    _require_rows(decoder_input, input_ids, labels, config, tp_group)
    if model.post_process and labels is None and input_ids is None:
        raise ValueError(
            "decoder_input came without labels and without input_ids, from which labels could be "
            "derived: MTP heads have nothing to be scored against. Pass labels, or "
            "compute_mtp_loss=False."
        )
    if options.plan is None:
        return options
    if options.isolated:
        decoder_input = decoder_input.detach()
    if overlapped and decoder_input.requires_grad:
        raise ValueError(
            "build_schedule_plan got a decoder_input that requires gradients, and MTP heads that "
            "are not isolated: two of its nodes would run backward through what made it. Pass "
            "mtp_isolated_loss=True or compute_mtp_loss=False, or set "
            "overlap_moe_expert_parallel_comm=False."
        )
    given = GivenEmbeddings(
        decoder_input, config.mtp_num_layers, packed_seq_params, groups.cp, tp_group
    )
    inputs_D = tuple(
        GivenInputs(**vars(inputs), embeddings=given, depth=depth)
        for depth, inputs in enumerate(options.plan.inputs_D, start=1)
    )
    plan = dataclasses.replace(options.plan, inputs_D=inputs_D)
    return dataclasses.replace(options, plan=plan)


def embed_ahead(inputs: DepthInputs, embedding: Callable[..., Tensor]) -> Tensor:
    """The embeddings one depth reads, [s, b, h]: those the model was given, else of shifted ids."""
    if isinstance(inputs, GivenInputs):
        return inputs.embeddings.ahead(inputs.depth)
    return embedding(input_ids=inputs.input_ids, position_ids=inputs.position_ids)


def require_embeddings_read(plan: Optional[DepthPlan]) -> None:
    """Refuse layers that embedded ids although embeddings were given; after the last depth.

    Raises:
        RuntimeError: a depth has not read them.
    """
    for inputs in () if plan is None else plan.inputs_D:
        if isinstance(inputs, GivenInputs) and inputs.depth not in inputs.embeddings.depths_read:
            raise RuntimeError(
                f"The model was given decoder_input, but the MTP layer of depth {inputs.depth} did "
                "not read it: its own _get_embeddings embeds input_ids, which hold placeholders. "
                "Let it call embed_ahead(mtp_inputs, embedding)."
            )


def _require_heads_here(model: LanguageModule, options: MTPOptions) -> None:
    elsewhere = model.pre_process and not (model.mtp_process or model.post_process)
    if elsewhere and options.wanted and model.config.mtp_num_layers:
        raise ValueError(
            "decoder_input is given to the pipeline stage with the embedding, but the MTP heads "
            "are on another stage, where only input_ids arrive: they would read the embeddings of "
            "placeholders. Use pipeline_model_parallel_size=1 or a pipeline_model_parallel_layout "
            "with the heads on the first stage, such as 'Ettm|L'; or pass compute_mtp_loss=False."
        )


def _require_rows(decoder_input, input_ids, labels, config, tp_group) -> None:
    ranks = 1 if tp_group is None else tp_group.size()
    expected = None
    for name, tokens in (("input_ids", input_ids), ("labels", labels)):
        if tokens is not None:
            expected = tokens.size(1) // ranks, tokens.size(0), config.hidden_size
            break
    if expected is not None and tuple(decoder_input.shape) != expected:
        raise ValueError(
            f"decoder_input must be [s, b, h] = {expected} for {name} {tuple(tokens.shape)} on "
            f"{ranks} rank(s) that share the positions, got {tuple(decoder_input.shape)}: pass "
            f"the same (context-parallel) part of all of them."
        )
