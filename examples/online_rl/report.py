"""What a run leaves behind: a line of JSON per step, a plot, a summary and a progress bar."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.online_rl.trainer import StepRecord

METRICS, PLOT, SUMMARY = "metrics.jsonl", "online_rl.png", "summary.json"
_SMOOTH = 10  # steps per averaged point


class Report:
    """The files of a run in one folder; silent on all ranks but one.

    Args:
        folder: where they go; made if missing.
        writes: whether this rank writes and prints.
    """

    def __init__(self, folder: Path, writes: bool) -> None:
        self.folder = folder
        self._writes = writes
        self._lines: list[str] = []
        if writes:
            folder.mkdir(parents=True, exist_ok=True)

    def watch(self, records: Iterator[StepRecord], total: int, title: str) -> list[StepRecord]:
        """Run `records` to its end behind a progress bar; return and keep them all."""
        seen = []
        quiet = not sys.stderr.isatty()  # a log file gets a line now and then, not a moving bar
        bar = tqdm(
            total=total,
            desc=f"{title:<20}",
            unit="step",
            disable=not self._writes,
            mininterval=10.0 if quiet else 0.1,
            dynamic_ncols=not quiet,
        )
        with bar:
            for record in records:
                seen.append(record)
                self._lines.append(json.dumps(asdict(record)))
                bar.set_postfix_str(_headline(record), refresh=False)
                bar.update()
        return seen

    def save(self, summary: dict[str, Any], online: list[StepRecord]) -> list[Path]:
        """Write the files, each under another name first; return their paths."""
        if not self._writes:
            return []
        paths = [self.folder / name for name in (METRICS, PLOT, SUMMARY)]
        lines = "\n".join(self._lines) + "\n"
        _replace(paths[0], lambda path: path.write_text(lines))
        _replace(paths[1], lambda path: plot(online, path))
        text = json.dumps(summary, indent=2) + "\n"
        _replace(paths[2], lambda path: path.write_text(text))
        return paths


def averages(records: list[StepRecord]) -> dict[str, Any]:
    """Return the mean reward, working, MTP loss and acceptance per depth over `records`."""
    depths = range(len(records[0].mtp_loss))
    return {
        "reward": _mean(record.reward for record in records),
        "working": _mean(record.working for record in records),
        "mtp_loss": [_mean(record.mtp_loss[d] for record in records) for d in depths],
        "mtp_acceptance": [_mean(record.mtp_acceptance[d] for record in records) for d in depths],
    }


def plot(records: list[StepRecord], path: Path) -> None:
    """Draw reward, MTP loss, acceptance and how far the policy moved, over the GRPO steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((reward, loss), (moved, acceptance)) = pyplot.subplots(
        2, 2, figsize=(11, 7), sharex=True, layout="constrained"
    )
    figure.suptitle("Online RL with MTP heads trained in the same forward")
    _curve(reward, records, lambda r: r.reward, "right answers (reward)", "C0")
    _curve(reward, records, lambda r: r.working, "answers that show the working", "C2")
    reward.set(ylabel="share of samples", ylim=(0, 1))
    _curve(moved, records, lambda r: r.policy_change, "distance from the warm start", "C4")
    moved.set(ylabel="relative parameter change", xlabel="GRPO step", ylim=(0, None))
    for depth in range(len(records[0].mtp_loss)):
        name, colour = f"depth {depth + 1}", f"C{2 * depth + 1}"
        _curve(loss, records, lambda r, d=depth: r.mtp_loss[d], name, colour)
        _curve(acceptance, records, lambda r, d=depth: r.mtp_acceptance[d], name, colour)
    loss.set(ylabel="MTP loss (nats per token)", ylim=(0, None))
    acceptance.set(ylabel="MTP acceptance (greedy)", xlabel="GRPO step")
    for axis in (reward, loss, moved, acceptance):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _curve(
    axis: Any,
    records: list[StepRecord],
    read: Callable[[StepRecord], float],
    name: str,
    colour: str,
) -> None:
    steps = [record.step for record in records]
    values = [read(record) for record in records]
    axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    smooth = [_mean(values[max(0, i + 1 - _SMOOTH) : i + 1]) for i in range(len(values))]
    axis.plot(steps, smooth, color=colour, label=name, linewidth=2)


def _headline(record: StepRecord) -> str:
    parts = [f"loss {record.loss:.3f}"] if record.reward is None else []
    if record.reward is not None:
        parts.append(f"reward {record.reward:.2f}")
    if record.mtp_loss:
        parts.append("MTP loss " + "/".join(f"{value:.2f}" for value in record.mtp_loss))
        parts.append("acceptance " + "/".join(f"{value:.2f}" for value in record.mtp_acceptance))
    return ", ".join(parts)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
