"""What training expected of drafts and what was measured, as tables of text and as HTML's words."""

from collections.abc import Iterator
from typing import Any

Rows = list[tuple[str, ...]]
EXPLANATION = """
<p>The final heads draft for {count} held-out problems. <em>Expected</em> comes from one training
forward on the very text that came out: from the overlaps Σ min(p, q), and from min(1, q/p) of the
text's own tokens, the probability that rejection sampling took them from a draft. ± is what chance
may put between both in 99 cases of 100.</p>
"""


def check_table(summary: dict[str, Any]) -> Rows:
    """Return a head, then a row per seed and arm: sampled drafts of the final heads, measured and
    as training on the same text expects them, ± the 99% interval of the difference."""
    rows: Rows = []
    for seed, arm, ways in _checks(summary):
        if not rows:
            names = [found["name"] for found in ways["sampling"]]
            rows.append(("sampling, final heads", *(f"{n}: measured, expected" for n in names)))
        cells = (
            f"{found['measured']:.3f} ± {found['margin']:.3f}, {found['expected']:.3f}"
            for found in ways["sampling"]
        )
        rows.append((f"seed {seed}, {arm}", *cells))
    return rows


def check_lines(summary: dict[str, Any]) -> list[str]:
    """Return how many checks agree, a sentence each for sampling and greedy decoding."""
    ways = [found for _, _, found in _checks(summary)]
    lines = []
    for way, word in (("sampling", "inside their 99% interval"), ("greedy", "equal")):
        checks = [one for found in ways for one in found[way]]
        if checks:
            agree = sum(one["agrees"] for one in checks)
            lines.append(f"expected and measured, {way}: {agree} of {len(checks)} {word}")
    return lines


def _checks(summary: dict[str, Any]) -> Iterator[tuple[int, str, dict[str, list[dict]]]]:
    for seed in summary["seeds"]:
        for arm, ways in (seed["checks"] or {}).items():
            yield seed["seed"], arm, ways
