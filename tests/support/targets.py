"""Packed sequences with their right MTP targets, read from ``data/packed_targets.json``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Targets:
    """What one depth is trained on: whole row or one rank's part. Lists over places.

    ``labels`` holds 0 where ``loss_mask`` is 0: labels matter only where it is 1.
    """

    labels: list[int]
    loss_mask: list[int]
    input_ids: list[int]


@dataclasses.dataclass(frozen=True)
class RankPart:
    """What one context-parallel rank owns: places, inputs, and the targets of every depth."""

    owned: list[int]
    inputs: Targets
    depths: list[Targets]


@dataclasses.dataclass(frozen=True)
class PackedTargets:
    """One case of ``data/packed_targets.json``; ``ranks[cp][rank]`` are the parts."""

    name: str
    cu_seqlens: list[int]
    cu_seqlens_padded: list[int]
    inputs: Targets
    depths: list[Targets]
    ranks: dict[int, list[RankPart]]


def load_packed_targets() -> list[PackedTargets]:
    """All cases of packed sequences with their right targets, whole and per rank."""
    text = (Path(__file__).parent / "data" / "packed_targets.json").read_text()
    return [_packed_targets(case) for case in json.loads(text)]


def _packed_targets(case: dict[str, Any]) -> PackedTargets:
    parts = {
        int(cp): [
            RankPart(part["owned"], _targets(part), [_targets(d) for d in part["depths"]])
            for part in ranks
        ]
        for cp, ranks in case["cp"].items()
    }
    return PackedTargets(
        name=case["name"],
        cu_seqlens=case["cu_seqlens"],
        cu_seqlens_padded=case["cu_seqlens_padded"],
        inputs=_targets(case),
        depths=[_targets(depth) for depth in case["depths"]],
        ranks=parts,
    )


def _targets(fields: dict[str, Any]) -> Targets:
    labels = fields.get("labels_where_supervised", fields.get("labels"))
    return Targets(labels, fields["loss_mask"], fields["input_ids"])
