"""How each cost scales: the exponent p of cost ≈ c · x^p, fitted over the measured sizes."""

from __future__ import annotations

import collections
import math
import statistics
from typing import Any, Iterator, Sequence

from tools.bench import objective, teacher, traffic
from tools.bench.results import Goal, Row
from tools.bench.sizes import Sizes

GROWTH = "growth (exponents)"
MEMORY_GOAL = Goal(0.1, "ours")
_AXES = {
    objective.TIME: ("s", "V", "D"),
    objective.MEMORY: ("s", "V", "D"),
    objective.EXTRA: ("s", "V", "D"),
    teacher.EXTRA: ("s",),
    traffic.CALLS: ("sequences", "D"),
    traffic.SYNCS: ("sequences", "D"),
}
_BOUNDED = (objective.EXTRA, teacher.EXTRA)


def exponent(x: Sequence[float], cost: Sequence[float]) -> float:
    """Slope of log cost over log x, by least squares; 0 for a cost that is 0 throughout.

    Raises:
        ValueError: fewer than two sizes, or some but not all costs are 0.
    """
    if len(set(x)) < 2:
        raise ValueError(f"an exponent needs two sizes, got {list(x)}")
    if not any(cost):
        return 0.0
    if min(cost) <= 0:
        raise ValueError(f"an exponent needs positive costs, got {list(cost)}")
    logs = [math.log(value) for value in x], [math.log(value) for value in cost]
    return statistics.linear_regression(*logs).slope


def measure(rows: list[Row], sizes: Sizes) -> Iterator[Row]:
    """One row per cost and size, the other sizes fixed where goals are stated."""
    at = {"s": sizes.at[0], "V": sizes.at[1], "D": 1, "isolated": False}
    at |= {"sequences": max(sizes.sequences), "CP": 2}
    for section, axes in _AXES.items():
        for axis in axes:
            for fixed, along in _lines(rows, section, axis, at).items():
                if section in _BOUNDED:  # what a chunk bounds, once there is a whole one
                    along = [row for row in along if row.key["s"] * row.key["share"] >= sizes.chunk]
                along.sort(key=lambda row: row.key[axis])
                if len(along) < 2:
                    continue
                x = [row.key[axis] for row in along]
                upstream = _exponent_of(x, [row.upstream for row in along])
                ours = _exponent_of(x, [row.ours for row in along])
                constant = section in _BOUNDED and axis == "s"
                name = f"{section.split(' at ')[0]}, over {axis}{_words(fixed)}"
                key = dict(axis=axis, of=section)
                goal = MEMORY_GOAL if constant else None
                yield Row(GROWTH, name, "", upstream, ours, goal, key, comparable=False)


def _lines(rows, section: str, axis: str, at: dict[str, Any]) -> dict[tuple, list[Row]]:
    """The rows along one axis, by what distinguishes parallel lines (share, what is counted)."""
    lines = collections.defaultdict(list)
    for row in rows:
        if row.section == section and axis in row.key and all(
            row.key.get(name, value) == value for name, value in at.items() if name != axis
        ):
            lines[tuple(row.key[name] for name in ("share", "what") if name in row.key)].append(row)
    return lines


def _exponent_of(x: list[float], cost: list[float | None]) -> float | None:
    known = [(size, value) for size, value in zip(x, cost) if value is not None]
    return exponent(*zip(*known)) if len(known) > 1 else None


def _words(fixed: tuple) -> str:
    words = [f"{value:.0%} supervised" if isinstance(value, float) else value for value in fixed]
    return "".join(f", {word}" for word in words)
