"""How failed and hanging ranks are reported."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

_TAIL_LINES = 120


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """One rank's failure.

    Attributes:
        rank: The rank.
        what: What happened to it, to be read after "rank N".
        detail: A traceback, stacks, or the end of a log.
    """

    rank: int
    what: str
    detail: str


def failure_report(name: str, world_size: int, failures: list[RankFailure]) -> str:
    """The message of a failed case: the first failure in full, and every hanging rank's stacks.

    Later failures of ranks that raised are usually lost connections to the first one: of those
    only the last line is shown.
    """
    lines = [f"{name} failed on {world_size} rank(s)"]
    first = failures[0]
    for failure in failures:
        lines.append(f"--- rank {failure.rank} {failure.what}")
        detail = failure.detail.strip() or "(nothing was written)"
        if failure is first or failure.what == first.what != "raised":
            lines.extend(detail.splitlines()[-_TAIL_LINES:])
        else:
            lines.append("    after that: " + detail.splitlines()[-1])
    return "\n".join(lines)


def wait_for_stacks(files: dict[int, Path], patience: float = 2.0) -> dict[int, str]:
    """Wait until every rank has written its stacks and stopped writing; return them by rank."""
    deadline = time.monotonic() + patience
    before: dict[int, str] = {}
    while time.monotonic() < deadline:
        texts = {rank: path.read_text() if path.exists() else "" for rank, path in files.items()}
        if all(texts.values()) and texts == before:
            break
        before = texts
        time.sleep(0.05)
    return before
