"""The report of a run: one HTML file that needs nothing else, neither files nor a network."""

import base64
import html
import json
from pathlib import Path
from typing import Any

from examples.online_rl.check_tables import EXPLANATION, check_lines, check_table
from examples.online_rl.plots import FIGURES
from examples.online_rl.record import ONLINE, StepRecord
from examples.online_rl.summary import describe, table

_STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
       color: #222 }
img { display: block; max-width: 100%; margin: 2rem auto }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem .9rem; border-bottom: 1px solid #ccc; text-align: right }
th:first-child, td:first-child { text-align: left }
.samples { display: block; overflow-x: auto }
.figures td { white-space: nowrap; font-variant-numeric: tabular-nums }
.samples td { text-align: left; font-family: monospace; white-space: pre }
code, pre { font: 14px/1.5 monospace; white-space: pre-wrap }
.warning { background: #fff3cd; padding: .5rem 1rem }
"""
_INTRODUCTION = """
<p>One policy, trained by GRPO twice from one warm start. In one arm its MTP heads learn from the
sampled tokens in the same forward as the policy; in the other they stay as the warm start left
them. The policy may not notice: parameters, sampled tokens and rewards must be equal bit for bit.
What differs is how many tokens a speculative decoder gets out of each pass of the policy.</p>
<p>A right answer earns 1 − w, and w times the share of spaced gaps in its working; a wrong one
nothing. w is <code>style_weight</code> below. RL thus changes what is written. <em>Measured</em>
lengths come from decoding held-out problems with the policy and heads of that step, the
<em>estimate</em> from the training forward on the sampled tokens. Faint lines are single steps,
strong ones means over the ten steps before. Of the change over time, part is the policy's own:
what is claimed is the gap between the arms, on the same policy.</p>
"""


def write_page(
    path: Path,
    summary: dict[str, Any],
    records: list[StepRecord],
    figures: list[Path],
) -> None:
    """Write the report.

    Args:
        path: the HTML file.
        summary: "seeds" (see `summarise`), "settings", "seconds" and "complete".
        records: of all seeds.
        figures: PNG files in the order of `FIGURES`.
    """
    parts = ["<h1>Online RL with MTP heads that learn along</h1>", _INTRODUCTION]
    if not summary["complete"]:
        parts.append("<p class=warning>The run was stopped early; this is what it left.</p>")
    for seed in summary["seeds"]:
        parts.append(html_table(table(seed)))
        *lines, verdict = (html.escape(line) for line in describe(seed))
        parts += [*(f"<p>{line}</p>" for line in lines), f"<p><strong>{verdict}</strong></p>"]
    for figure, (title, _) in zip(figures, FIGURES.values(), strict=True):
        parts.append(image(figure, title))
    if checks := check_table(summary):
        parts.append("<h2>What the trainer expects of drafts, and what was measured</h2>")
        parts.append(EXPLANATION.format(count=summary["settings"]["check_prompts"]))
        parts.append(html_table(checks))
        parts += [f"<p>{html.escape(line)}</p>" for line in check_lines(summary)]
    parts += ["<h2>What the policy writes</h2>", _examples(records)]
    write_document(path, "Online RL with MTP heads", [*parts, *closing(summary)])


def write_document(path: Path, title: str, parts: list[str]) -> None:
    """Write `parts`, HTML, as a page in the style of the reports."""
    body = "\n".join(parts)
    path.write_text(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n",
        encoding="utf-8",
    )


def closing(summary: dict[str, Any]) -> list[str]:
    """Return how a report ends: "settings" and "seconds" of the run."""
    settings = html.escape(json.dumps(summary["settings"], indent=2))
    return [f"<h2>Settings</h2><pre>{settings}</pre>", f"<p>{summary['seconds']:.0f} s in all.</p>"]


def image(png: Path, title: str) -> str:
    """Return a picture that carries its data along."""
    data = base64.b64encode(png.read_bytes()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


def html_table(rows: list[tuple[str, ...]], kind: str = "figures") -> str:
    """Return a table; the first row is its head."""
    head, *others = rows
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in others]
    return f"<table class={kind}>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _examples(records: list[StepRecord]) -> str:
    online = [r for r in records if r.phase == ONLINE and r.seed == records[0].seed]
    stride = max(1, len(online) // 6)
    shown = online[:-1:stride] + online[-1:]
    rows = [("step", "first sample")] + [(str(r.step), r.example) for r in shown]
    return html_table(rows, "samples")
