"""The figures of docs/performance.md, written from a summary.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Collection

from tools.bench.results import cells

TARGET = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def update(
    summary: Path, device: str, target: Path = TARGET, sections: Collection[str] = ()
) -> None:
    """Replace the figures of one device in ``target`` by those of a summary.

    Args:
        summary: a summary.json.
        device: "cpu" or "cuda"; names the markers between which the figures stand.
        target: a Markdown file with both markers, each on a line of its own.
        sections: what the command must have measured; figures of fewer would replace all.

    Raises:
        ValueError: the markers are not there, or the summary is one of --quick sizes or lacks
            sections.
    """
    found = json.loads(summary.read_text())
    if found["machine"]["quick"]:
        raise ValueError(f"{summary} holds figures of --quick sizes; measure in full first")
    missing = set(sections) - set(found["machine"].get("sections", sections))
    if missing:
        names = ", ".join(sorted(missing))
        raise ValueError(f"{summary} lacks figures ({names}); measure without --only first")
    text = target.read_text()
    begin, end = (f"<!-- figures {device}: {word} -->\n" for word in ("begin", "end"))
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected one line {begin.strip()!r} and one {end.strip()!r} in {target}")
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    target.write_text(f"{head}{begin}{render(found)}{end}{tail}")


def render(summary: dict[str, Any]) -> str:
    """All rows as Markdown tables under the machine they were measured on."""
    machine, rows = summary["machine"], summary["rows"]
    judged = [row for row in rows if row["met"] is not None]
    met = sum(row["met"] for row in judged)
    lines = [
        "",
        f"Measured on {machine['device']}, torch {machine['torch']}, {machine['dtype']}, "
        f"h={machine['hidden']}, chunk {machine['chunk']}, {machine['threads']} thread(s), "
        f"{machine['clock']} time, medians of {machine['repeats']}. "
        f"Goals met: {met} of {len(judged)}.",
        "",
    ]
    for section in dict.fromkeys(row["section"] for row in rows):
        lines += [f"### {section[0].upper()}{section[1:]}", ""]
        lines += ["| | upstream | ours | ratio | goal | met |", "|---|---:|---:|---:|---|---|"]
        lines += [f"| {' | '.join(cells(row))} |" for row in rows if row["section"] == section]
        lines.append("")
    return "\n".join(lines) + "\n"
