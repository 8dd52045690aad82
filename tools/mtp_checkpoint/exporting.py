"""From Megatron's MTP layer back into a complete Hugging Face directory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tools.mtp_checkpoint import launch
from tools.mtp_checkpoint.checkpoint import check_fit, load_head, read_manifest
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.export_report import CHANGED, IDENTICAL, ExportReport, ExportRow
from tools.mtp_checkpoint.families import detect
from tools.mtp_checkpoint.importing import layer_tensors
from tools.mtp_checkpoint.mapping import take
from tools.mtp_checkpoint.planning import Original, Plan, make_plan
from tools.mtp_checkpoint.report import raw_bytes
from tools.mtp_checkpoint.rereading import reread
from tools.mtp_checkpoint.rules import Rule
from tools.mtp_checkpoint.source import DTYPES, INDEX, HFDirectory
from tools.mtp_checkpoint.splice import splice
from tools.mtp_checkpoint.staging import check_destination, check_space, staged

_NOT_COPIED = (".git", ".cache")  # what hubs and git keep beside a checkpoint

Tensors = dict[str, torch.Tensor]


def export_directory(
    checkpoint: Path, like: Path, out: Path, *, layout: str | None = None
) -> ExportReport:
    """Write a copy of a checkpoint directory with a trained head in it.

    Only shards that hold tensors of the head are rewritten; everything else is copied. Each tensor
    keeps the dtype that it, or what it replaces, has in ``like``. An unchanged head in the same
    layout gives files that are equal byte for byte.

    Args:
        checkpoint: What `import_directory` or `save_head` wrote, at any expert-parallel size.
        like: The Hugging Face directory to copy; only read.
        out: New directory; it appears when it has been written, read again and compared.
        layout: Of the experts; None keeps that of ``like``.

    Returns:
        For each tensor of the head whether its bits changed.

    Raises:
        CheckpointError: The inputs do not fit each other, or the destination cannot be written.
    """
    contents = read_manifest(checkpoint)
    directory = HFDirectory.open(like)
    family = detect(directory)
    old_rules = family.check(directory)
    check_fit(contents, family, directory)
    layout = layout or family.layout(directory)
    rules = family.rules(directory.text_config, layout)
    check_destination(out, like, checkpoint)
    check_space(out, sum(file.stat().st_size for file in _files(like)))
    original = Original(directory, old_rules)
    plan = make_plan(original, rules)
    with staged(out) as temporary:
        rows = launch.run(_export_rank, 1, checkpoint, original, plan, temporary, layout)[0]
    return ExportReport(family.name, layout, tuple(plan.shards), tuple(rows))


def _export_rank(
    groups: Any, checkpoint: Path, original: Original, plan: Plan, out: Path, layout: str
) -> list[ExportRow]:
    """Write into ``out``, then read it again; one rank does it all."""
    head = load_head(checkpoint, groups=groups, device="cpu")
    tensors = {name: tensor.detach() for name, tensor in layer_tensors(head).items()}
    writer = _Writer(original, plan, tensors)
    directory = original.directory
    others = [file for file in _files(directory.path) if _name(file, directory) not in plan.shards]
    total = sum(file.stat().st_size for file in others)
    total += sum(output.nbytes for outputs in plan.shards.values() for output in outputs)
    with tqdm(total=total, unit="B", unit_scale=True, desc="export", disable=None) as bar:
        for file in others:
            _copy(file, out / _name(file, directory))
            bar.update(file.stat().st_size)
        for name, outputs in plan.shards.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            old, header = directory.path / name, directory.headers[name]
            if outputs:
                splice(old, header, out / name, outputs, writer.content, bar.update)
    if plan.index is not None:
        text = json.dumps(plan.index, indent=2, ensure_ascii=False) + "\n"
        (out / INDEX).write_text(text, encoding="utf-8")
    reread(out, original, plan, tensors, layout)
    return [writer.rows[key] for key in sorted(writer.rows)]


class _Writer:
    """Gives the bytes of the head's tensors, and notes what they were."""

    def __init__(self, original: Original, plan: Plan, tensors: Tensors):
        self.original, self.parts, self.tensors = original, plan.parts, tensors
        self.files = plan.files()
        self.rows: dict[str, ExportRow] = {}

    def content(self, key: str) -> Iterator[memoryview]:
        """One tensor, piece by piece."""
        digest, same, nbytes = hashlib.sha256(), True, 0
        for rule, index in self.parts[key]:
            name = self.original.dtype(rule, index)
            piece = take(rule, index, self.tensors[rule.target()], DTYPES[name])
            if not piece.isfinite().all():
                raise CheckpointError(
                    f"{rule.pieces[index]} is not finite in {name}: the head has diverged, or is "
                    "too large for that dtype"
                )
            theirs = self._original_piece(rule, index, DTYPES[name])
            part = raw_bytes(piece)
            same = same and part == raw_bytes(theirs)
            digest.update(part)
            nbytes += len(part)
            yield part
        shape = rule.pieces[index].tensor_shape
        status = IDENTICAL if same else CHANGED
        self.rows[key] = ExportRow(
            key, self.files[key], shape, name, nbytes, digest.hexdigest(), status
        )

    def _original_piece(self, rule: Rule, index: int, dtype: torch.dtype) -> torch.Tensor:
        parameter = self.original.tensor(rule.entry.target, rule.expert)
        return take(rule, index, parameter, dtype)


def _files(path: Path) -> list[Path]:
    """All files to copy or rewrite, in order."""
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not set(file.relative_to(path).parts) & set(_NOT_COPIED)
    )


def _name(file: Path, directory: HFDirectory) -> str:
    return str(file.relative_to(directory.path))


def _copy(file: Path, target: Path) -> None:
    """Copy contents, never a link: a later edit of one must not change the other."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
