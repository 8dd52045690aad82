"""The plots of a run: a column per seed, a row per quantity, both arms in each panel."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.online_rl.record import FROZEN, ONLINE, StepRecord

_SMOOTH = 10  # steps per averaged point
_COLOURS = {ONLINE: "C0", FROZEN: "C3"}
_STYLES = {ONLINE: "-", FROZEN: "--"}  # what both arms share is then seen to be shared


@dataclass(frozen=True)
class _Panel:
    """A quantity to draw; `read` gives it, None where a record has none; `top` ends the axis."""

    label: str
    read: Callable[[StepRecord], float | None]
    bottom: float | None = None
    top: float | None = None


def _depth(name: str, depth: int) -> Callable[[StepRecord], float | None]:
    return lambda record: (getattr(record, name) or [None] * depth)[depth - 1]


FIGURES: dict[str, tuple[str, list[_Panel]]] = {
    "accepted_length": (
        "Accepted length: tokens per pass of the policy, heads drafting",
        [
            _Panel("measured, sampling", lambda r: r.measured_length),
            _Panel("measured, greedy", lambda r: r.measured_length_greedy),
            _Panel("the trainer's estimate", lambda r: r.estimated_length),
        ],
    ),
    "policy": (
        "The policy: what RL changes, and the same in both arms",
        [
            _Panel("right answers", lambda r: r.right, 0, 1),
            _Panel("spaced gaps", lambda r: r.spaced, 0, 1),
            _Panel("reward", lambda r: r.reward, 0, 1),
            _Panel("parameter change", lambda r: r.policy_change, 0),
        ],
    ),
    "heads": (
        "The heads on the sampled tokens",
        [
            _Panel("loss, depth 1 (nats)", _depth("mtp_loss", 1), 0),
            _Panel("acceptance, depth 1", _depth("mtp_acceptance", 1)),
            _Panel("loss, depth 2 (nats)", _depth("mtp_loss", 2), 0),
            _Panel("acceptance, depth 2", _depth("mtp_acceptance", 2)),
        ],
    ),
}


def draw(records: list[StepRecord], folder: Path) -> list[Path]:
    """Draw every figure of `FIGURES` as a PNG file in `folder`; return their paths."""
    return [_figure(name, records, folder / f"{name}.png") for name in FIGURES]


def _figure(name: str, records: list[StepRecord], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    title, panels = FIGURES[name]
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
            for arm in (ONLINE, FROZEN):
                _curve(axis, [r for r in records if (r.seed, r.phase) == (seed, arm)], panel, arm)
            axis.grid(alpha=0.3)
        row[0].set_ylim(panel.bottom, panel.top)  # of the whole row; ends the automatic scale
    for seed, top, bottom in zip(seeds, axes[0], axes[-1]):
        top.set_title(f"seed {seed}")
        top.legend()
        bottom.set_xlabel("GRPO step")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _curve(axis: Any, records: list[StepRecord], panel: _Panel, arm: str) -> None:
    points = [(r.step, panel.read(r)) for r in records if panel.read(r) is not None]
    if not points:
        return
    steps, values = zip(*points)
    look = dict(color=_COLOURS[arm], linestyle=_STYLES[arm])
    axis.plot(steps, values, color=look["color"], alpha=0.25, linewidth=1)
    smooth = []
    for index, step in enumerate(steps):
        near = [v for s, v in points[: index + 1] if s > step - _SMOOTH]
        smooth.append(sum(near) / len(near))
    axis.plot(steps, smooth, label=f"heads {arm}", linewidth=2, **look)
