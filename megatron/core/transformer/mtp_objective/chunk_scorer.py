"""What the rows of a chunk are scored with: the cross-entropy, or what is put in its place.

Shape suffixes: R rows of one depth (position-major), N rows of a chunk, V this rank's part of the
vocabulary.
"""

from __future__ import annotations

from typing import Optional, Protocol

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.chunk_checks import ASKED, INSTEAD
from megatron.core.transformer.mtp_objective.chunk_logits import Logits
from megatron.core.transformer.mtp_objective.chunk_workspace import Head, Rows
from megatron.core.transformer.mtp_objective.vocab_parallel import (
    RowLosses,
    cross_entropy_in_place,
)


class Scorer(Protocol):
    """What rows are scored with. Depths come in order, and the chunks of each in order.

    Attributes:
        asked, instead: for messages, what asks for this scorer and how to do without.
    """

    asked: str
    instead: str

    def start(self, head: Head, rows: int, dtype: torch.dtype) -> None:
        """Prepare for chunks of up to ``rows`` rows, 0 for none, on every rank."""

    def weigh(self, depth: int, weights_R: Tensor) -> Tensor:
        """The weights [r] that the rows of a depth (from 0) get in place of the given ones."""

    def score(
        self,
        depth: int,
        rows: Rows,
        logits: Logits,
        labels_N: Tensor,
        idle_N: Optional[Tensor],
    ) -> RowLosses:
        """Replace a chunk's logits by the gradient of their losses, times ``sum_N``.

        ``idle_N``, bool [n] or None for none, tells rows that are there but do not count.
        """


class CrossEntropy:
    """The `Scorer` that `chunked_cross_entropy` uses if it is given none."""

    asked, instead = ASKED, INSTEAD

    def start(self, head: Head, rows: int, dtype: torch.dtype) -> None:
        """Remember who shares the vocabulary."""
        self._tp_group = head.tp_group

    def weigh(self, depth: int, weights_R: Tensor) -> Tensor:
        """As they are."""
        return weights_R

    def score(self, depth, rows, logits, labels_N, idle_N) -> RowLosses:
        """See `cross_entropy_in_place`."""
        return cross_entropy_in_place(logits, labels_N, self._tp_group)
