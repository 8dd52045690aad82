"""Rows of the report, the table on the terminal and summary.json."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any, Iterable, Literal

SUMMARY = "summary.json"
_WIDTH = 110  # columns of the table, also when it is written to a file


@dataclasses.dataclass(frozen=True)
class Goal:
    """An upper limit for one column of a row.

    Attributes:
        limit: the largest value that meets it.
        of: the column, "ratio" or "ours".
    """

    limit: float
    of: Literal["ratio", "ours"] = "ratio"

    def __str__(self) -> str:
        return f"{self.of} ≤ {self.limit:g}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure of both sides.

    Attributes:
        section: which part of the report, e.g. "objective time".
        name: what was measured, with its sizes.
        unit: of ``upstream`` and ``ours``; "" for counts and exponents.
        upstream: the unpatched release's value; None where it could not run (out of memory) or
            has no such path.
        ours: ours.
        goal: an accepted limit, or None for a figure without one.
        key: the sizes as numbers, for fits and plots.
        comparable: whether ours over upstream's says anything.
    """

    section: str
    name: str
    unit: str
    upstream: float | None
    ours: float | None
    goal: Goal | None = None
    key: dict[str, Any] = dataclasses.field(default_factory=dict)
    comparable: bool = True

    @property
    def ratio(self) -> float | None:
        """Ours over upstream's; None where one is missing, upstream's is 0 or neither compares."""
        if not self.comparable or self.ours is None or not self.upstream:
            return None
        return self.ours / self.upstream

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal or without the value it limits."""
        if self.goal is None:
            return None
        value = getattr(self, self.goal.of)
        return None if value is None else value <= self.goal.limit

    def as_json(self) -> dict[str, Any]:
        """The row as it stands in summary.json."""
        names = ("section", "name", "unit", "upstream", "ours", "ratio")
        fields = {name: getattr(self, name) for name in names}
        goal = None if self.goal is None else str(self.goal)
        return {**fields, "goal": goal, "met": self.met, "key": self.key}


def save(folder: Path, rows: Iterable[Row], machine: dict[str, Any], name: str = SUMMARY) -> Path:
    """Write summary.json (under another name first); returns its path.

    Raises:
        ValueError: a figure is not finite: a measurement went wrong.
    """
    rows = list(rows)
    for row in rows:
        if any(v is not None and not math.isfinite(v) for v in (row.upstream, row.ours)):
            raise ValueError(f"{row.name}: upstream {row.upstream}, ours {row.ours}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    partial = path.with_name(f".{name}.{os.getpid()}.partial")
    text = json.dumps({"machine": machine, "rows": [row.as_json() for row in rows]}, indent=1)
    partial.write_text(text + "\n")
    os.replace(partial, path)
    return path


def show(rows: Iterable[Row]) -> None:
    """Print one table per section, and how many goals are met."""
    from rich.console import Console
    from rich.table import Table

    rows, console = list(rows), Console(width=_WIDTH)
    for section in dict.fromkeys(row.section for row in rows):
        table = Table(title=section, title_justify="left")
        for title in ("", "upstream", "ours", "ratio", "goal", "met"):
            table.add_column(title, justify="left" if title in ("", "goal") else "right")
        for row in rows:
            if row.section == section:
                table.add_row(*cells(row))
        console.print(table)
    print(verdict(rows))


def verdict(rows: Iterable[Row]) -> str:
    """How many goals are met, and the names of those that are not, a line each."""
    judged = [row for row in rows if row.met is not None]
    missed = [f"{row.section}: {row.name}" for row in judged if not row.met]
    text = f"goals met: {len(judged) - len(missed)} of {len(judged)}"
    return "\n  not met: ".join([text, *missed])


def cells(row: Row | dict[str, Any]) -> list[str]:
    """Name, upstream, ours, ratio, goal, met as text; takes a row or its JSON."""
    fields = row.as_json() if isinstance(row, Row) else row
    met = {None: "", True: "yes", False: "NO"}[fields["met"]]
    unit = f" [{fields['unit']}]" if fields["unit"] else ""
    numbers = [number(fields[name]) for name in ("upstream", "ours", "ratio")]
    return [fields["name"] + unit, *numbers, fields["goal"] or "", met]


def number(value: float | None) -> str:
    """Three significant digits; integers as they are; "–" for a missing value."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    if abs(value) < 1e-3 or abs(value) >= 1e7:
        return f"{value:.2e}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
