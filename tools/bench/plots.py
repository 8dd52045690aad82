"""Pictures of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.bench import objective, step, traffic, width
from tools.bench.results import Row
from tools.bench.sizes import Sizes

_COLOURS = {1.0: "C0", 0.25: "C1", 0.05: "C2"}


def draw(folder: Path, rows: list[Row], sizes: Sizes) -> list[Path]:
    """Write a PNG per section that has rows; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    drawings = {
        "objective": _objective,
        "width": _width,
        "messages": _messages,
        "step": _steps,
    }
    for name, drawing in drawings.items():
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        if drawing(axes, rows, sizes):
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=120, format="png")
        pyplot.close(figure)
    return paths


def _objective(axes: Any, rows: list[Row], sizes: Sizes) -> bool:
    vocabulary, found = sizes.at[1], False
    for axis, section, unit in zip(axes, (objective.TIME, objective.MEMORY), ("ms", "MB")):
        fixed = dict(V=vocabulary, D=1, isolated=False)
        for share in sizes.fractions:
            line = _line(rows, section, "s", share=share, **fixed)
            found = found or bool(line)
            _curve(axis, line, "s", "ours", f"ours, {share:.0%} supervised", _COLOURS[share], "-")
            if share == sizes.fractions[0]:
                _curve(axis, line, "s", "upstream", "upstream", "black", "--")
        axis.set(xscale="log", yscale="log", xlabel="sequence length", ylabel=unit)
        title = f"{section}\nh={sizes.hidden} V={vocabulary}, one depth, forward + backward"
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3, which="both")
        axis.legend()
    return found


def _width(axes: Any, rows: list[Row], sizes: Sizes) -> bool:
    lines = {f"ours, {share:.0%} supervised": str(share) for share in sizes.fractions}
    lines[width.PRODUCTS] = width.PRODUCTS
    found = False
    for axis, side, title in zip(axes, ("ours", "ratio"), ("ms", "share of upstream's time")):
        for number, (name, what) in enumerate(lines.items()):
            line = _line(rows, width.WIDTH, "h", what=what)
            found = found or bool(line)
            dashes = ":" if what == width.PRODUCTS else "-"
            _curve(axis, line, "h", side, name, f"C{number}", dashes)
        if side == "ours":
            _curve(axis, line, "h", "upstream", "upstream", "black", "--")
            axis.legend(fontsize=8, loc="upper left")
        length, vocabulary = sizes.at
        axis.set(xscale="log", yscale="log" if side == "ours" else "linear", ylabel=title)
        axis.set_xticks(sizes.widths, [str(h) for h in sizes.widths])
        axis.set_xticks([], minor=True)
        axis.set_xlabel("width h")
        axis.set_ylim(top=axis.get_ylim()[1] * (20 if side == "ours" else 1))  # the legend's place
        axis.set_title(f"objective time, s={length} V={vocabulary}, one depth", fontsize=9)
        axis.grid(alpha=0.3, which="both")
    return found


def _messages(axes: Any, rows: list[Row], sizes: Sizes) -> bool:
    found = False
    for axis, what in zip(axes, ("calls", "bytes")):
        for number, depths in enumerate(sizes.message_depths):
            line = _line(rows, traffic.CALLS, "sequences", D=depths, what=what)
            found = found or bool(line)
            for side, dashes in (("ours", "-"), ("upstream", "--")):
                _curve(axis, line, "sequences", side, f"{side}, D={depths}", f"C{number}", dashes)
        axis.set(xscale="log", yscale="log", xlabel="sequences per microbatch", ylabel=what)
        axis.set_title(f"{what} per rank, microbatch and CP=2")
        axis.grid(alpha=0.3, which="both")
        axis.legend()
    return found


def _steps(axes: Any, rows: list[Row], sizes: Sizes) -> bool:
    found = [row for row in rows if row.section == step.STEP]
    times = [row for row in found if row.key["what"] == "time"]
    ratios = [row for row in found if row.key["what"] != "time"]
    _bars(axes[0], times, [row.key["mode"] for row in times], "ms per training step")
    names = [f"{row.key['mode']}\n{row.key['what'].split()[0]}" for row in ratios]
    _bars(axes[1], ratios, names, "relative to a step without heads")
    return bool(found)


def _bars(axis: Any, rows: list[Row], names: list[str], title: str) -> None:
    for shift, side in ((-0.2, "upstream"), (0.2, "ours")):
        places = [number + shift for number in range(len(rows))]
        axis.bar(places, [getattr(row, side) for row in rows], width=0.4, label=side)
    axis.set_xticks(range(len(rows)), names)
    axis.set_title(title)
    axis.grid(alpha=0.3, axis="y")
    axis.legend()


def _line(rows: list[Row], section: str, along: str, **fixed: Any) -> list[Row]:
    found = [
        row
        for row in rows
        if row.section == section and all(row.key.get(k) == v for k, v in fixed.items())
    ]
    return sorted(found, key=lambda row: row.key[along])


def _curve(axis: Any, line: list[Row], along: str, side: str, name: str, colour, dashes) -> None:
    points = [(row.key[along], getattr(row, side)) for row in line]
    points = [(x, y) for x, y in points if y]  # none where a GPU's memory did not suffice
    if points:
        axis.plot(*zip(*points), dashes, marker="o", color=colour, label=name)
