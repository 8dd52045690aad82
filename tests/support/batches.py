"""Batches whose values say where they come from, and their context-parallel parts.

Token j of sequence i is ``stride * (i + 1) + j`` with stride 10 for short sequences: 10, 11, 12
belong to the first one, 20, 21 to the second. Padding is 0. Labels and masks are
prediction-aligned: ``labels[b, t]`` is the token after ``input_ids[b, t]``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Sequence

import torch

from tests.support.device import device
from tests.support.sharding import shard

Mask = Literal["full", "prompt", "one-hot", "empty"]
MASKS: tuple[Mask, ...] = ("full", "prompt", "one-hot", "empty")


@dataclasses.dataclass(frozen=True)
class Batch:
    """One microbatch, whole or one rank's part.

    Attributes:
        input_ids: [b, s] int64; b is 1 for packed batches.
        position_ids: [b, s] int64, restarting in every packed sequence.
        labels: [b, s] int64, 0 where there is no next token.
        loss_mask: [b, s] float32, 1 where predicting the label counts.
        cu_seqlens: Starts of the packed sequences without padding, closed by the real total;
            None for BSHD.
        cu_seqlens_padded: The same with padding; None when nothing is padded.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: tuple[int, ...] | None = None
    cu_seqlens_padded: tuple[int, ...] | None = None

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """Starts of the sequences in the row, padding included; None for BSHD."""
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded

    @property
    def packed_seq_params(self):
        """A new ``PackedSeqParams`` of the whole row, or None for BSHD."""
        if self.cu_seqlens is None:
            return None
        from megatron.core.packed_seq_params import PackedSeqParams

        real = _int32(self.cu_seqlens)
        padded = None if self.cu_seqlens_padded is None else _int32(self.cu_seqlens_padded)
        longest = max(b - a for a, b in zip(self.boundaries, self.boundaries[1:]))
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real.clone(),
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=None if padded is None else padded.clone(),
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def forward_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a model's forward, labels and loss mask included."""
        return dict(
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            attention_mask=None,
            labels=self.labels,
            loss_mask=self.loss_mask,
            packed_seq_params=self.packed_seq_params,
        )


def bshd_batch(
    batch: int = 2, length: int = 16, mask: Mask | Sequence[Sequence[int]] = "full"
) -> Batch:
    """``batch`` rows of ``length`` tokens; the last label is the token the row would go on with.

    Args:
        batch: Rows.
        length: Tokens per row, below 64.
        mask: A named mask (see `_mask_row`; "one-hot" marks the first row alone), or one list of
            0 and 1 per row.
    """
    stride = 10 if length < 10 else 20
    rows = [[(stride * (i + 1) + j) % 64 for j in range(length + 1)] for i in range(batch)]
    if isinstance(mask, str):
        masks = [_mask_row(mask, length, length, i == 0) for i in range(batch)]
    else:
        masks = [list(row) for row in mask]
    return Batch(
        input_ids=_int64([row[:-1] for row in rows]),
        position_ids=_int64([list(range(length))] * batch),
        labels=_int64([row[1:] for row in rows]),
        loss_mask=_float32(masks),
    )


def thd_batch(
    lengths: Sequence[int] = (5, 3),
    padded_lengths: Sequence[int] | None = (8, 4),
    mask: Mask | Sequence[int] = "full",
) -> Batch:
    """Sequences packed into one row; the last token of each has no label.

    Args:
        lengths: Real tokens of each sequence.
        padded_lengths: Places of each in the row; None packs without padding. For CP n each must
            divide by 2n.
        mask: A named mask (see `_mask_row`; "one-hot" marks the longest sequence alone), or 0 and
            1 for the whole padded row.
    """
    places = list(lengths if padded_lengths is None else padded_lengths)
    stride = 10 if max(lengths) <= 10 else 20
    longest = list(lengths).index(max(lengths))
    ids, positions, labels, masks = [], [], [], []
    for i, (length, place) in enumerate(zip(lengths, places, strict=True)):
        padding = [0] * (place - length)
        tokens = [(stride * (i + 1) + j) % 64 for j in range(length)]
        ids += tokens + padding
        labels += tokens[1:] + [0] + padding
        positions += range(place)
        if isinstance(mask, str):
            masks += _mask_row(mask, length - 1, place, i == longest)
    return Batch(
        input_ids=_int64([ids]),
        position_ids=_int64([positions]),
        labels=_int64([labels]),
        loss_mask=_float32([masks if isinstance(mask, str) else list(mask)]),
        cu_seqlens=_cumulative(lengths),
        cu_seqlens_padded=None if padded_lengths is None else _cumulative(padded_lengths),
    )


def cp_shard(batch: Batch, cp: int, rank: int) -> Batch:
    """The part of a whole batch that ``rank`` of ``cp`` holds; boundaries stay those of the row."""
    names = ("input_ids", "position_ids", "labels", "loss_mask")
    parts = {name: shard(getattr(batch, name), cp, rank, batch.boundaries) for name in names}
    return dataclasses.replace(batch, **parts)


def _mask_row(mask: Mask, labels: int, places: int, chosen: bool) -> list[int]:
    """Mask of one sequence with ``labels`` labels in ``places`` places.

    "full" marks every label, "prompt" the second half, "one-hot" the last label of the chosen
    sequence (so that its depth-k loss sits k places before it), "empty" none.
    """
    first = {"full": 0, "prompt": labels // 2, "one-hot": labels - 1, "empty": labels}[mask]
    if mask == "one-hot" and not chosen:
        first = labels
    return [int(first <= place < labels) for place in range(places)]


def _cumulative(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))


def _int64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device())


def _int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device())


def _float32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device())
