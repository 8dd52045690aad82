"""The tables of a comparison of objectives: rows of text, for the terminal and for the page."""

from typing import Any

from examples.online_rl.check_tables import Rows, check_lines, check_table
from examples.online_rl.record import FROZEN

QUANTITIES = {
    "final_length": "final heads, sampling",
    "final_length_greedy": "final heads, greedy",
    "measured_length": "last steps, sampling",
    "measured_length_greedy": "last steps, greedy",
    "estimated_length": "expected, greedy drafts",
    "expected_length": "expected, sampled drafts",
}


def length_table(summary: dict[str, Any], quantity: str) -> Rows:
    """Return a head, then a row per arm: its value in every seed, their mean, and its mean lead
    over the frozen heads and over those trained by "ce"; [] if no arm has a value.

    Args:
        summary: of `comparison.run`.
        quantity: a key of `QUANTITIES`.
    """
    seeds, arms = summary["seeds"], list(summary["arms"])
    found = {arm: [seed["last"].get(arm, {}).get(quantity) for seed in seeds] for arm in arms}
    if not any(value is not None for values in found.values() for value in values):
        return []
    head = (QUANTITIES[quantity], *(f"seed {seed['seed']}" for seed in seeds), "mean")
    bases = [base for base in (FROZEN, "ce") if base in arms]
    rows = [(*head, *(f"over {base}" for base in bases))]
    for arm in arms:
        leads = [_lead(found[arm], found[base]) if base != arm else "" for base in bases]
        rows.append((arm, *map(_number, found[arm]), _number(_mean(found[arm])), *leads))
    return rows


def verdicts(summary: dict[str, Any]) -> list[str]:
    """Return what was proved, a sentence each."""
    lines = []
    for seed in summary["seeds"]:
        arms: dict[tuple[bool, str], list[str]] = {}  # by what was found
        for arm, found in (seed["isolation"] or {}).items():
            arms.setdefault((found["passed"], found["text"]), []).append(arm)
        for (passed, text), names in arms.items():
            word = "PASSED" if passed else "FAILED"
            lines.append(f"seed {seed['seed']}, {', '.join(names)}: isolation {word}: {text}")
    return [*lines, *check_lines(summary)]


def text_report(summary: dict[str, Any]) -> list[str]:
    """Return the lines for the terminal."""
    lines = [] if summary["complete"] else ["stopped early; this is what there is"]
    tables = [length_table(summary, quantity) for quantity in QUANTITIES]
    for rows in filter(None, [*tables, check_table(summary)]):
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines.append("")
        for name, *cells in rows:
            padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:]))
            lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return [*lines, "", *verdicts(summary)]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _lead(ours: list[float | None], theirs: list[float | None]) -> str:
    """The mean difference and, of several seeds, the smallest and the largest."""
    gaps = [a - b for a, b in zip(ours, theirs) if a is not None and b is not None]
    if not gaps:
        return ""
    spread = f" ({min(gaps):+.3f} … {max(gaps):+.3f})" if len(gaps) > 1 else ""
    return f"{_mean(gaps):+.3f}{spread}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
