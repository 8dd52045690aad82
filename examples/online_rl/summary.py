"""The figures of a run: means over its first and last steps, and the gap between the arms."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from examples.online_rl.judge import Checks, plain
from examples.online_rl.record import FROZEN, ONLINE, StepRecord
from examples.online_rl.verify import IsolationReport

# Name of a StepRecord's field, and what a reader calls it.
ROWS = {
    "reward": "reward",
    "right": "right answers",
    "spaced": "spaced gaps",
    "working": "answers that show the working",
    "measured_length": "accepted length, sampling",
    "measured_length_greedy": "accepted length, greedy",
    "estimated_length": "the trainer's estimate of it",
}
COLUMNS = ("first", ONLINE, FROZEN)


def averages(
    records: list[StepRecord], names: Iterable[str] = ROWS
) -> dict[str, float | None]:
    """Return the mean of each field in `names` over the records that have it, None if none has."""
    means: dict[str, float | None] = {}
    for name in names:
        values = [v for record in records if (v := getattr(record, name)) is not None]
        means[name] = sum(values) / len(values) if values else None
    return means


def summarise(
    records: list[StepRecord],
    isolation: IsolationReport | None,
    checks: dict[str, Checks] | None = None,
) -> dict[str, Any]:
    """Return the figures of one seed; its arms may have stopped before their last step.

    Args:
        records: of one seed.
        isolation: the comparison of its arms, None if the run did not get there.
        checks: by arm, what training expected of the final heads' drafts; None likewise.
    """
    online = [record for record in records if record.phase == ONLINE]
    frozen = [record for record in records if record.phase == FROZEN]
    window = max(1, len(online) // 10)
    summary = {
        "seed": records[0].seed,
        "steps": len(online),
        "window": window,
        "first": averages(online[:window]),
        ONLINE: averages(online[-window:]),
        FROZEN: averages(frozen[-window:]),
        "gap": None,
        "policy_change": online[-1].policy_change if online else None,
        "isolation": None,
        "isolation_text": "not reached",
        "checks": checks and plain(checks),
    }
    lengths = [summary[arm]["measured_length"] for arm in (ONLINE, FROZEN)]
    if None not in lengths:
        summary["gap"] = lengths[0] - lengths[1]
    if isolation is not None:
        found = {**dataclasses.asdict(isolation), "passed": isolation.passed}
        verdict = "PASSED" if isolation.passed else "FAILED"
        summary |= {"isolation": found, "isolation_text": f"{verdict}: {isolation.describe()}"}
    return summary


def table(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of one seed: a head, then a name and its means, as text."""
    rows = [(f"seed {summary['seed']}", "first", "heads online", "heads frozen")]
    for field, name in ROWS.items():
        values = [summary[column][field] for column in COLUMNS]
        rows.append((name, *("" if value is None else f"{value:.3f}" for value in values)))
    return rows


def describe(summary: dict[str, Any]) -> list[str]:
    """Return what the table of one seed shows, a sentence each; the last is the comparison."""
    lines = [
        f"Means over {summary['window']} steps: the first ones, and the last ones of each arm."
    ]
    if summary["gap"] is not None:
        lines.append(
            "At the end speculative sampling from the one policy accepts "
            f"{summary['gap']:+.3f} tokens per step with the online heads against the frozen ones."
        )
    if summary["policy_change"] is not None:
        lines.append(f"The policy's parameters moved by {summary['policy_change']:.1%}.")
    return [*lines, f"isolation {summary['isolation_text']}"]
