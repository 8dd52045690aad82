"""What happened to every tensor, as JSON and as a table."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

CHECKSUM = "sha256"


@dataclass(frozen=True)
class Row:
    """One source, or one row of a packed source, in one parameter.

    Attributes:
        source: Key in the checkpoint, with ``[expert]`` for a row of a packed tensor.
        operation: How it lies in the parameter.
        target: Parameter of the MTP layer, with the expert's index in the model.
        shape: Of the source.
        target_shape: Of the parameter.
        dtype: Of the source, as torch names it.
        target_dtype: Of the parameter.
        nbytes: Bytes of the source.
        checksum: SHA-256 of the source's bytes, in hexadecimal.
        rank: Expert-parallel rank that read it; of tensors that all ranks read, the first.
    """

    source: str
    operation: str
    target: str
    shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    dtype: str
    target_dtype: str
    nbytes: int
    checksum: str
    rank: int = 0


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        family: Name of the family of models.
        layout: Layout of the checkpoint's experts.
        expert_parallel_size: Number of ranks that the experts were spread over.
        rows: One for each source, in the order of the table.
        parameters: Number of weights of the whole head.
        nbytes: Bytes read from the checkpoint, each tensor counted once.
        narrowed: Whether a source is wider than its parameter, so that bits were lost.
        ranks: Seconds, bytes read and peak memory of every rank.
    """

    family: str
    layout: str
    expert_parallel_size: int
    rows: tuple[Row, ...]
    parameters: int
    nbytes: int
    narrowed: bool
    ranks: tuple[dict[str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`."""
        return {"checksum": CHECKSUM, **dataclasses.asdict(self)}

    def with_peaks(self, nbytes: Sequence[int]) -> ImportReport:
        """The same with each rank's peak memory as it is now, in bytes."""
        pairs = zip(self.ranks, nbytes, strict=True)
        ranks = tuple({**used, "peak_rss_bytes": peak} for used, peak in pairs)
        return dataclasses.replace(self, ranks=ranks)


def peak_rss() -> int:
    """Most memory that this process has held so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, in hexadecimal; the tensor is on the CPU."""
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, as safetensors stores them; copied only if not contiguous."""
    return memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())


def console() -> Console:
    """Where tables go: as wide as the terminal, and wide enough for names where there is none."""
    standard = Console()
    return standard if standard.is_terminal else Console(width=200)


def import_table(report: ImportReport, full: bool = False) -> Table:
    """The report as a table; experts in one line for each kind unless ``full``."""
    table = Table(title=f"{report.family}, {report.layout}", title_justify="left")
    for name in ("source", "operation", "target", "shape", "dtype", "bytes", "sha256"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for rows in _grouped(report.rows, full):
        first, count = rows[0], len(rows)
        dtype = first.dtype.replace("torch.", "")
        if first.dtype != first.target_dtype:
            dtype += " > " + first.target_dtype.replace("torch.", "")
        cells = (
            first.source if count == 1 else f"{pattern(first.source)}  x{count}",
            first.operation,
            first.target if count == 1 else pattern(first.target),
            "x".join(map(str, first.shape)),
            dtype,
            f"{sum(row.nbytes for row in rows):,}",
            first.checksum[:12] if count == 1 else "in the report",
        )
        table.add_row(*(Text(cell) for cell in cells))  # names hold brackets, which are no markup
    table.caption = f"{len(report.rows)} sources, {report.parameters:,} parameters"
    table.caption += f", {report.nbytes:,} bytes"
    return table


_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)|\[\d+\]$")


def pattern(name: str) -> str:
    """The name with an expert's number left open."""
    return _EXPERT.sub(lambda found: "[*]" if found[0].startswith("[") else "*", name)


def _grouped(rows: tuple[Row, ...], full: bool) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.source if full else pattern(row.source), []).append(row)
    return list(groups.values())
