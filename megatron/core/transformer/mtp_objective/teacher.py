"""The policy as the teacher of its heads, chunk by chunk.

Shape suffixes: S positions, B batch rows, R = s · b rows of one depth (position-major), N rows of a
chunk, V this rank's part of the vocabulary, H hidden size, D depths.

Depth k at position t predicts the token that the policy itself predicts at t + k. So the hidden
row that its teacher's logits are made of is the decoder's at t + k, inside the same sequence.
Under context parallelism the first rows of chunks travel, in one message for all depths; under
sequence parallelism the rows are gathered over the tensor-parallel ranks, once. Logits are
projected for the rows of one chunk, beside the head's. Neither the decoder's rows nor the weight
gets a gradient from here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective.chunk_logits import Logits
from megatron.core.transformer.mtp_objective.chunk_workspace import (
    ChunkWorkspace,
    Head,
    Rows,
    put_rows,
)
from megatron.core.transformer.mtp_objective.divergences import (
    Divergence,
    RowScores,
    score_in_place,
)
from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.objective_config import (
    ASKED,
    WITHOUT_TEACHER,
    check_objective_config,
    divergence_of,
    needs_teacher,
)
from megatron.core.transformer.mtp_objective.row_shift import ShiftedRows
from megatron.core.transformer.mtp_objective.targets import DepthTargets

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class Teacher:
    """The `Scorer` that compares heads with the policy. It serves one forward.

    Attributes:
        accepted_DR: of the depths scored so far, a = Σ min(p, q) of each row [r], without gradient;
            1 where the row does not count.
    """

    asked, instead = ASKED, WITHOUT_TEACHER

    def __init__(
        self,
        decoder_SBH: Tensor,
        num_depths: int,
        layout: SequenceLayout,
        divergence: Divergence,
        chained: bool = False,
    ):
        """Hold what `start` and `score` work with.

        Args:
            decoder_SBH: what the policy's logits are projected from, [s, b, h], or
                [s / tp, b, h] under sequence parallelism.
            num_depths: D.
            layout: where the positions sit.
            divergence: what is trained.
            chained: weigh depth k by the probability that the depths before it were accepted,
                Π_{j<k} a_j of the same position. A depth that does not count there counts as 1.
        """
        self._decoder_SBH = decoder_SBH.detach()
        self._num_depths, self._layout = num_depths, layout
        self._divergence, self._chained = divergence, chained
        self._rows: Optional[ShiftedRows] = None
        self._workspace: Optional[ChunkWorkspace] = None
        self._chain_R: Optional[Tensor] = None
        self.accepted_DR: list[Tensor] = []

    def start(self, head: Head, rows: int, dtype: torch.dtype) -> None:
        """See `Scorer`. Every rank sends, also one without rows that count."""
        head = dataclasses.replace(head, weight_VH=head.weight_VH.detach())
        self._workspace = ChunkWorkspace(head, rows, dtype, trains_weight=False)
        decoder_SBH = self._decoder_SBH
        if head.sequence_parallel:
            rows_RH = self._workspace.open_rows(decoder_SBH)
            decoder_SBH = rows_RH.view(-1, *decoder_SBH.shape[1:])
        self._rows = ShiftedRows.of(decoder_SBH, self._num_depths, self._layout)

    def weigh(self, depth: int, weights_R: Tensor) -> Tensor:
        """See `Scorer`; called at the start of a depth, when those before it are scored."""
        if depth > 0 and self._chained:
            before_R = self.accepted_DR[-1]
            self._chain_R = before_R if depth == 1 else self._chain_R * before_R
            weights_R = weights_R * self._chain_R
        self.accepted_DR.append(torch.ones_like(weights_R))
        return weights_R

    def score(
        self,
        depth: int,
        rows: Rows,
        logits: Logits,
        labels_N: Tensor,
        idle_N: Optional[Tensor],
    ) -> RowScores:
        """See `Scorer`."""
        decoder_NH = self._rows.take(depth + 1, rows)
        if idle_N is not None:
            decoder_NH = decoder_NH.masked_fill(idle_N.unsqueeze(-1), 0)
        teacher = self._workspace.project(decoder_NH)
        scores = score_in_place(
            logits, teacher, labels_N, self._divergence, self._workspace.head.tp_group
        )
        accepted_N = scores.accepted_N
        if idle_N is not None:
            accepted_N = accepted_N.masked_fill(idle_N, 1)
        put_rows(self.accepted_DR[depth], rows, accepted_N)
        return scores

    def token_major(self, depth: int, batch: int) -> Tensor:
        """a of a depth (from 0), [b, s]."""
        return self.accepted_DR[depth].view(-1, batch).t()


def teacher_of(
    decoder_SBH: Tensor,
    targets: DepthTargets,
    config: TransformerConfig,
    packed_seq_params: Optional[PackedSeqParams] = None,
    cp_group: Optional[torch.distributed.ProcessGroup] = None,
) -> Optional[Teacher]:
    """The teacher that the configuration asks for, of one forward; None if it asks for none.

    Args:
        decoder_SBH: what the policy's logits are projected from, [s, b, h] or [s / tp, b, h].
        targets: of this microbatch.
        config: the model's.
        packed_seq_params: boundaries of packed sequences.
        cp_group: ranks that share the sequences.

    Raises:
        ValueError: a field of the configuration has been set to something that cannot work.
    """
    check_objective_config(config)  # Again: a field may have been set since the model was built.
    if not needs_teacher(config):
        return None
    layout = SequenceLayout.of(targets.mask_BS, packed_seq_params, cp_group)
    chained = config.mtp_depth_weighting == "chained"
    return Teacher(decoder_SBH, config.mtp_num_layers, layout, divergence_of(config), chained)
