"""What an export wrote, as JSON and as a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from tools.mtp_checkpoint.report import CHECKSUM, pattern

IDENTICAL, CHANGED = "bit-identical", "changed"


@dataclass(frozen=True)
class ExportRow:
    """One tensor of the head.

    Attributes:
        key: Its name in the exported directory.
        file: The shard it is in.
        shape: Its shape.
        dtype: As the format writes it.
        nbytes: Its length in bytes.
        checksum: SHA-256 of its bytes, in hexadecimal.
        status: Compared with the checkpoint exported into: "bit-identical" or "changed".
    """

    key: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    checksum: str
    status: str


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        family: Name of the family of models.
        layout: Layout of the experts that was written.
        rewritten: Shards that were rewritten; all other files were copied.
        rows: One for each tensor of the head.
    """

    family: str
    layout: str
    rewritten: tuple[str, ...]
    rows: tuple[ExportRow, ...]

    @property
    def changed(self) -> int:
        """Number of tensors whose bits changed."""
        return sum(row.status == CHANGED for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`."""
        return {"checksum": CHECKSUM, **dataclasses.asdict(self)}


def export_table(report: ExportReport, full: bool = False) -> Table:
    """The report as a table; experts in one line for each kind and status unless ``full``."""
    table = Table(title=f"{report.family}, {report.layout}", title_justify="left")
    for name in ("key", "file", "shape", "dtype", "bytes", "against the original"):
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    groups: dict[tuple[str, str, str], list[ExportRow]] = {}
    for row in report.rows:
        name = row.key if full else pattern(row.key)
        groups.setdefault((name, row.file, row.status), []).append(row)
    for (name, file, status), rows in groups.items():
        cells = (
            name if len(rows) == 1 else f"{name}  x{len(rows)}",
            file,
            "x".join(map(str, rows[0].shape)),
            rows[0].dtype,
            f"{sum(row.nbytes for row in rows):,}",
            status,
        )
        table.add_row(*(Text(cell) for cell in cells))
    identical = len(report.rows) - report.changed
    counts = f"{identical} bit-identical, {report.changed} changed"
    table.caption = f"{len(report.rows)} tensors: {counts}"
    return table
