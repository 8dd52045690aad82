"""Packed rows and their shift in plain lists: the reference for the MTP objective's one shift."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Callable, Sequence

import torch

from tests.support.device import device
from tests.support.sharding import zigzag_indices

PADDING, TAIL = 7, 9  # not 0: a shift that reads padding shows


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """Sequences in one row: token j of sequence i is 10 (i + 1) + j, stride 100 if any is long.

    Attributes:
        lengths: Real tokens of each sequence.
        places: Places of each in the row, padding included.
        tail: Tokens behind the last sequence (on each rank, under context parallelism).
    """

    lengths: Sequence[int]
    places: Sequence[int]
    tail: Sequence[int] = ()

    @property
    def starts(self) -> list[int]:
        """Starts of the sequences in the row, and the end of the last one."""
        return [0, *itertools.accumulate(self.places)]

    @property
    def values(self) -> list[int]:
        """The whole row, tail included."""
        stride = 10 if max(self.lengths, default=0) <= 10 else 100
        row = []
        for i, (length, place) in enumerate(zip(self.lengths, self.places, strict=True)):
            row += [stride * (i + 1) + j for j in range(length)] + [PADDING] * (place - length)
        return row + list(self.tail)

    def shifted(self, k: int) -> list[int]:
        """``values`` looked ahead by k inside each sequence, 0 where it has no such token."""
        bounds = list(zip(self.starts, self.lengths))
        return look_ahead(self.values, k, bounds)

    def part(self, values: Sequence[int], cp: int, rank: int) -> list[int]:
        """What ``rank`` of ``cp`` holds of a row made by ``values`` or ``shifted``."""
        total = self.starts[-1]
        return [values[i] for i in zigzag_indices(total, cp, rank, self.starts)] + list(
            values[total:]
        )

    def packed_seq_params(self):
        """Boundaries; without padded ones where nothing is padded."""
        padded = None if list(self.lengths) == list(self.places) else self.starts
        return packed_seq_params([0, *itertools.accumulate(self.lengths)], padded)


def look_ahead(
    values: Sequence[float], k: int, bounds: Sequence[tuple[int, int]]
) -> list[float]:
    """``values[t + k]`` at t inside each sequence, 0 where there is none; k = 0 changes nothing.

    Args:
        values: One row.
        k: At least 0.
        bounds: (start, real tokens) of each sequence.
    """
    if k == 0:
        return list(values)
    row = [0] * len(values)
    for start, length in bounds:
        for j in range(length - k):
            row[start + j] = values[start + j + k]
    return row


def draw_row(integer: Callable[[int, int], int], multiple: int) -> PackedRow:
    """A random row of 1 to 5 sequences, some empty, of one token, or all padding.

    Args:
        integer: Draws an int between two bounds, both included.
        multiple: Divides every number of places (2 * cp under context parallelism).
    """
    is_padded = integer(0, 1)
    lengths, places = [], []
    for _ in range(integer(1, 5)):
        if is_padded:
            length = integer(0, 12)
            place = -(-length // multiple) * multiple + multiple * integer(0, 1)
        else:
            length = place = multiple * integer(0, max(1, 12 // multiple))
        lengths.append(length)
        places.append(place)
    if not sum(places):
        lengths.append(multiple)
        places.append(multiple)
    return PackedRow(lengths, places, [TAIL] * integer(0, 3))


def packed_seq_params(cu_seqlens: Sequence[int], cu_seqlens_padded: Sequence[int] | None = None):
    """A ``PackedSeqParams`` with these boundaries, int32 on `device`."""
    from megatron.core.packed_seq_params import PackedSeqParams

    def int32(values):
        return torch.tensor(list(values), dtype=torch.int32, device=device())

    padded = None if cu_seqlens_padded is None else int32(cu_seqlens_padded)
    bounds = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    longest = max((b - a for a, b in zip(bounds, bounds[1:])), default=0)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=int32(cu_seqlens),
        cu_seqlens_kv=int32(cu_seqlens),
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def supervised_counts(case: str) -> list[int]:
    """Supervised targets of every depth of a case of ``data/packed_targets.json``, as it says."""
    text = (Path(__file__).parent / "data" / "packed_targets.json").read_text()
    depths = next(c["depths"] for c in json.loads(text) if c["name"] == case)
    return [depth["supervised"] for depth in depths]
