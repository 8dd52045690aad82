"""The plots of a run: a column per seed, a row per quantity, all arms in each panel."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.online_rl.record import FROZEN, ONLINE, StepRecord


@dataclass(frozen=True)
class Panel:
    """A quantity to draw; `read` gives it, None where a record has none; `top` ends the axis."""

    label: str
    read: Callable[[StepRecord], float | None]
    bottom: float | None = None
    top: float | None = None


@dataclass(frozen=True)
class Look:
    """How the curve of an arm looks; dashes show where another one lies below."""

    label: str
    colour: str
    style: str


def _depth(name: str, depth: int) -> Callable[[StepRecord], float | None]:
    return lambda record: (getattr(record, name) or [None] * depth)[depth - 1]


FIGURES: dict[str, tuple[str, list[Panel]]] = {
    "accepted_length": (
        "Accepted length: tokens per pass of the policy, heads drafting",
        [
            Panel("measured, sampling", lambda r: r.measured_length),
            Panel("measured, greedy", lambda r: r.measured_length_greedy),
            Panel("the trainer's estimate", lambda r: r.estimated_length),
        ],
    ),
    "policy": (
        "The policy: what RL changes, and the same in both arms",
        [
            Panel("right answers", lambda r: r.right, 0, 1),
            Panel("spaced gaps", lambda r: r.spaced, 0, 1),
            Panel("reward", lambda r: r.reward, 0, 1),
            Panel("parameter change", lambda r: r.policy_change, 0),
        ],
    ),
    "heads": (
        "The heads on the sampled tokens",
        [
            Panel("loss, depth 1 (nats)", _depth("mtp_loss", 1), 0),
            Panel("acceptance, depth 1", _depth("mtp_acceptance", 1)),
            Panel("loss, depth 2 (nats)", _depth("mtp_loss", 2), 0),
            Panel("acceptance, depth 2", _depth("mtp_acceptance", 2)),
        ],
    ),
}


ARMS = {ONLINE: Look("heads online", "C0", "-"), FROZEN: Look("heads frozen", "C3", "--")}


def draw(records: list[StepRecord], folder: Path) -> list[Path]:
    """Draw every figure of `FIGURES` as a PNG file in `folder`; return their paths."""
    paths = [folder / f"{name}.png" for name in FIGURES]
    for path, (title, panels) in zip(paths, FIGURES.values()):
        draw_figure(title, panels, ARMS, records, [path])
    return paths


def draw_figure(
    title: str,
    panels: list[Panel],
    arms: dict[str, Look],
    records: list[StepRecord],
    paths: list[Path],
    smooth: int = 10,
) -> None:
    """Draw `panels` below each other and a column per seed, with a curve per arm in each.

    Args:
        title: stands above.
        panels: the quantities.
        arms: names of arms and how they look, in the legend's order.
        records: of all seeds and arms.
        paths: files to write; their endings say in which formats.
        smooth: steps that a point of a strong line is the mean of.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text in SVG, and one run gives one file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": title})
    seeds = sorted({record.seed for record in records})
    figure, axes = pyplot.subplots(
        len(panels),
        len(seeds),
        figsize=(max(7.0, 4.5 * len(seeds)), 2.6 * len(panels)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    figure.suptitle(title)
    for panel, row in zip(panels, axes):
        row[0].set_ylabel(panel.label)
        for seed, axis in zip(seeds, row):
            for arm, look in arms.items():
                own = [r for r in records if (r.seed, r.phase) == (seed, arm)]
                _curve(axis, own, panel, look, smooth)
            axis.grid(alpha=0.3)
        row[0].set_ylim(panel.bottom, panel.top)  # of the whole row; ends the automatic scale
    for seed, top, bottom in zip(seeds, axes[0], axes[-1]):
        top.set_title(f"seed {seed}")
        bottom.set_xlabel("GRPO step")
    curves, names = axes[0][0].get_legend_handles_labels()
    if curves:
        figure.legend(curves, names, loc="outside lower center", ncols=len(names))
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=110, metadata=metadata)
    pyplot.close(figure)


def _curve(
    axis: Any, records: list[StepRecord], panel: Panel, look: Look, smooth: int
) -> None:
    points = [(r.step, panel.read(r)) for r in records if panel.read(r) is not None]
    if not points:
        return
    steps, values = zip(*points)
    axis.plot(steps, values, color=look.colour, alpha=0.25, linewidth=1)
    means = []
    for index, step in enumerate(steps):
        near = [v for s, v in points[: index + 1] if s > step - smooth]
        means.append(sum(near) / len(near))
    axis.plot(
        steps, means, label=look.label, linewidth=2, color=look.colour, linestyle=look.style
    )
