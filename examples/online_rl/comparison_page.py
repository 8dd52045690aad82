"""The figure and the page of a comparison of objectives."""

import html
from pathlib import Path
from typing import Any

from examples.online_rl.check_tables import EXPLANATION, check_table
from examples.online_rl.comparison_tables import QUANTITIES, length_table, verdicts
from examples.online_rl.page import closing, html_table, image, write_document
from examples.online_rl.plots import Look, Panel, draw_figure
from examples.online_rl.record import FROZEN, StepRecord

PAGE, FIGURE = "report.html", "objectives"
_SMOOTH = 25  # objectives lie closer together than online and frozen heads do
_COLOURS = {"ce": "C0", "kl": "C1", "tv": "C2", "ce+tv": "C4"}
_TITLE = "Accepted length by what the heads are trained for, on one policy"
_PANELS = [
    Panel("measured, sampling", lambda r: r.measured_length),
    Panel("measured, greedy", lambda r: r.measured_length_greedy),
    # Where the others were measured: the frozen heads have it only there.
    Panel("expected by the trainer", lambda r: r.measured_length and r.expected_length),
]
_INTRODUCTION = """
<p>One RL run per seed and arm, all from one warm start: heads <em>frozen</em>, or trained on the
sampled tokens by cross-entropy (<em>ce</em>), forward KL from the policy (<em>kl</em>), total
variation (<em>tv</em>), or one of them with depth k weighted by the probability that the drafts
before it are accepted (<em>chained</em>). Learning rate, clipping, batches and steps are the same.
The heads are isolated: policy, sampled tokens and rewards are those of the frozen arm bit for bit,
so the judge, speculative decoding of held-out problems with the heads of that step, sees the heads
alone. Faint lines are single measurements, strong ones means over the {smooth} steps before.</p>
"""
_SIMPLER = """
<p>The last panel and the last two tables above are the simpler figures of the training forward on
the sampled tokens, over positions with targets at every depth: chained overlaps and, for engines
that draft greedily and verify by sampling, chained hits of the most likely token. They leave the
ends of answers out, where drafts are lost: chained overlaps lie above what was measured.</p>
"""


def draw_comparison(records: list[StepRecord], arms: list[str], folder: Path) -> Path:
    """Draw the figure as PNG and SVG; return the PNG."""
    trained = [arm for arm in arms if arm != FROZEN]
    looks = {arm: _look(arm) for arm in trained} | {FROZEN: Look(FROZEN, "0.4", ":")}
    paths = [folder / f"{FIGURE}.png", folder / f"{FIGURE}.svg"]
    panels = [panel for panel in _PANELS if any(panel.read(r) is not None for r in records)]
    draw_figure(_TITLE, panels, looks, records, paths, _SMOOTH)
    return paths[0]


def _look(arm: str) -> Look:
    """An objective has a colour; dashes say that its depths are chained."""
    objective = arm.removeprefix("chained-")
    return Look(arm, _COLOURS[objective], "-" if arm == objective else "--")


def write_comparison(path: Path, summary: dict[str, Any], figure: Path) -> None:
    """Write the page: `section` and the settings."""
    title = "What should MTP heads be trained for?"
    parts = [f"<h1>{title}</h1>", *section(summary, figure), *closing(summary)]
    write_document(path, title, parts)


def section(summary: dict[str, Any], figure: Path) -> list[str]:
    """Return the comparison as HTML that can stand in any page.

    Args:
        summary: of `comparison.run`.
        figure: a PNG file.
    """
    parts = [_INTRODUCTION.format(smooth=_SMOOTH)]
    if not summary["complete"]:
        parts.append("<p class=warning>The run was stopped early; this is what it left.</p>")
    parts.append(image(figure, _TITLE))
    window = summary["seeds"][0]["window"]
    parts.append(
        f"<p><em>Final heads</em>: {summary['settings']['check_prompts']} held-out problems each. "
        f"<em>Last steps</em>, and <em>expected</em> by the trainer: means over the last {window}. "
        "In brackets the seeds' extremes.</p>"
    )
    tables = (length_table(summary, quantity) for quantity in QUANTITIES)
    parts += [html_table(rows) for rows in tables if rows]
    if checks := check_table(summary):
        parts.append("<h2>What the trainer expects, and what was measured</h2>")
        parts.append(EXPLANATION.format(count=summary["settings"]["check_prompts"]) + _SIMPLER)
        parts.append(html_table(checks))
    lines = [f"<li>{html.escape(line)}</li>" for line in verdicts(summary)]
    return [*parts, "<ul>", *lines, "</ul>"]
