"""What a checkpoint directory holds of a head, and what stands in the way; from headers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import Family, detect
from tools.mtp_checkpoint.headers import TensorInfo
from tools.mtp_checkpoint.report import pattern
from tools.mtp_checkpoint.source import HFDirectory


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        path: The directory.
        family: Name of the family of models, or None if it is not known.
        layout: Layout of the experts, or None if it cannot be told.
        tensors: The head's tensors, by key; with copies of the target's tensors, if there are any.
        problems: Everything that would make an import fail, so far as headers show it. Values that
            are not finite show only when they are read.
        ignored: Pickles that hold no weights of the model; they were not opened.
    """

    path: Path
    family: str | None
    layout: str | None
    tensors: tuple[TensorInfo, ...]
    problems: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the head."""
        return sum(info.nbytes for info in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`."""
        return {
            "path": str(self.path),
            "family": self.family,
            "layout": self.layout,
            "bytes": self.nbytes,
            "problems": list(self.problems),
            "ignored": list(self.ignored),
            "tensors": {
                info.key: {
                    "shape": list(info.shape),
                    "dtype": info.dtype,
                    "file": info.file,
                    "bytes": info.nbytes,
                }
                for info in self.tensors
            },
        }


def inspect_directory(path: Path) -> Inspection:
    """Look at a directory without reading a tensor.

    Raises:
        CheckpointError: It is no checkpoint directory at all.
    """
    directory, problems = HFDirectory.scan(path)
    try:
        family = detect(directory)
    except CheckpointError as error:
        problems = [*problems, *error.problems]
        return Inspection(Path(path), None, None, (), tuple(problems), directory.ignored)
    problems += [p for p in family.problems(directory) if p not in problems]
    layout, tensors = _layout(family, directory), _head(family, directory)
    return Inspection(
        Path(path), family.name, layout, tensors, tuple(problems), directory.ignored
    )


def inspection_table(found: Inspection, full: bool = False) -> Table:
    """The head's tensors; experts in one line for each kind unless ``full``."""
    title = f"{found.family or 'unknown family'}, layout {found.layout or 'unknown'}"
    table = Table(title=title, title_justify="left")
    for name in ("key", "shape", "dtype", "bytes", "file"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    groups: dict[str, list[TensorInfo]] = {}
    for info in found.tensors:
        groups.setdefault(info.key if full else pattern(info.key), []).append(info)
    for name, infos in groups.items():
        files = sorted({info.file for info in infos})
        cells = (
            name if len(infos) == 1 else f"{name}  x{len(infos)}",
            " or ".join(sorted({"x".join(map(str, info.shape)) for info in infos})),
            " or ".join(sorted({info.dtype for info in infos})),
            f"{sum(info.nbytes for info in infos):,}",
            files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more",
        )
        table.add_row(*(Text(cell) for cell in cells))
    table.caption = f"{len(found.tensors)} tensors, {found.nbytes:,} bytes"
    return table


def _layout(family: Family, directory: HFDirectory) -> str | None:
    try:
        return family.layout(directory)
    except CheckpointError:
        return None


def _head(family: Family, directory: HFDirectory) -> tuple[TensorInfo, ...]:
    try:
        prefix = family.key_prefix(directory.text_config)
    except CheckpointError:
        return ()
    return tuple(info for key, info in sorted(directory.tensors.items()) if key.startswith(prefix))
