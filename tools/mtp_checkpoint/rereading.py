"""An exported directory is read again, and its head imported again, before it gets its name."""

from __future__ import annotations

from pathlib import Path

import torch

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import detect
from tools.mtp_checkpoint.mapping import fill, take
from tools.mtp_checkpoint.planning import Original, Plan
from tools.mtp_checkpoint.report import raw_bytes
from tools.mtp_checkpoint.rules import Rule
from tools.mtp_checkpoint.source import DTYPES, HFDirectory
from tools.mtp_checkpoint.splice import ranges


def reread(
    out: Path, original: Original, plan: Plan, tensors: dict[str, torch.Tensor], layout: str
) -> None:
    """Compare an exported directory with what it should be.

    The head is imported again, parameter by parameter, by the import's own code, and compared with
    the layer bit for bit after rounding to the checkpoint's dtype. Every other tensor of a
    rewritten shard is compared with the original byte for byte.

    Args:
        out: The exported directory.
        original: What it was made from.
        plan: What was written.
        tensors: Of the layer, by the names that rules use.
        layout: Expected.

    Raises:
        CheckpointError: Anything differs.
    """
    directory = HFDirectory.open(out)
    family = detect(directory)
    rules = family.check(directory)
    if (found := family.layout(directory)) != layout:
        raise CheckpointError(f"read again, the layout is {found}, expected {layout}")
    for rule in rules:
        _compare_parameter(rule, directory, tensors[rule.target()])
    _compare_others(directory, original.directory, plan)


def _compare_parameter(rule: Rule, directory: HFDirectory, tensor: torch.Tensor) -> None:
    again = torch.empty(rule.target_shape)
    fill(rule, directory, again)
    for index, piece in enumerate(rule.pieces):
        dtype = DTYPES[directory.tensors[piece.key].dtype]
        ours, theirs = take(rule, index, tensor, dtype), take(rule, index, again, dtype)
        if raw_bytes(ours) != raw_bytes(theirs):
            raise CheckpointError(f"{piece} read again differs from the layer's {rule.target()}")


def _compare_others(new: HFDirectory, old: HFDirectory, plan: Plan) -> None:
    kept = old.tensors.keys() - plan.replaced
    if lost := sorted(kept - new.tensors.keys()):
        raise CheckpointError(f"{lost[0]} was lost ({len(lost)} tensors)")
    if extra := sorted(new.tensors.keys() - kept - plan.parts.keys()):
        raise CheckpointError(f"{extra[0]} is left over ({len(extra)} tensors)")
    for name in plan.shards.keys() & new.headers.keys():
        with open(old.path / name, "rb") as before, open(new.path / name, "rb") as after:
            for info in old.headers[name].tensors:
                if info.key not in kept:
                    continue
                pairs = zip(ranges(before, info), ranges(after, new.tensors[info.key]), strict=True)
                if any(left != right for left, right in pairs):
                    raise CheckpointError(f"{info.key} read again differs from the original")
