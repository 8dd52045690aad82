"""What a run leaves behind: a line of JSON per step and evaluation, TensorBoard, a plot."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

METRICS, PLOT, TENSORBOARD = "metrics.jsonl", "finetune.png", "tensorboard"


class Report:
    """The files of a run in one folder; does nothing on all ranks but one.

    Args:
        folder: where they go.
        writes: whether this rank writes and prints.
        total: steps of the run.
        done: steps of the run it continues; what that run reported of later ones is dropped.
    """

    def __init__(self, folder: Path, writes: bool, total: int, done: int = 0) -> None:
        self._folder, self._writes = folder, writes
        self._records = [r for r in read_metrics(folder) if r["step"] <= done] if writes else []
        if not writes:
            return
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(record) + "\n" for record in self._records)
        _replace(folder / METRICS, lambda path: path.write_text(lines))
        self._file = (folder / METRICS).open("a")
        self._tensorboard = SummaryWriter(str(folder / TENSORBOARD), purge_step=done + 1)
        quiet = not sys.stderr.isatty()  # a log file gets a line now and then, not a moving bar
        self._bar = tqdm(
            total=total,
            initial=done,
            desc="fine-tuning",
            unit="step",
            mininterval=10.0 if quiet else 0.1,
            dynamic_ncols=not quiet,
        )
        self._shown: dict[str, str] = {}

    def add(self, kind: str, step: int, **values: float) -> None:
        """Report one step ("train") or evaluation ("held_out") at once."""
        if not self._writes:
            return
        record = {"kind": kind, "step": step, **values}
        self._records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(f"{kind}/{name}", value, step)
        self._shown[kind] = f"{kind.replace('_', '-')} loss {values['loss']:.3f}"
        if "acceptance" in values:
            self._shown[kind] += f", acceptance {values['acceptance']:.3f}"
        if "accepted_length" in values:
            self._shown[kind] += f", accepted length {values['accepted_length']:.3f}"
        self._bar.set_postfix_str("; ".join(self._shown.values()), refresh=False)
        if kind == "train":
            self._bar.update()

    def say(self, text: str) -> None:
        """Print a line beside the progress bar."""
        if self._writes:
            self._bar.write(text)

    def close(self) -> None:
        """Draw the plot and close the files."""
        if not self._writes:
            return
        self._bar.close()
        self._file.close()
        self._tensorboard.close()
        _replace(self._folder / PLOT, lambda path: plot(self._records, path))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; none if it has not reported yet. A torn last line is left out."""
    path = folder / METRICS
    if not path.is_file():
        return []
    whole, _, _torn = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss in training and held out, and the held-out acceptance, over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train = [record for record in records if record["kind"] == "train"]
    held_out = [record for record in records if record["kind"] == "held_out"]
    figure, (loss, acceptance) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    figure.suptitle("Fine-tuning the MTP head, the model frozen")
    steps = [record["step"] for record in train]
    loss.plot(steps, [r["loss"] for r in train], "C0", alpha=0.4, label="training step")
    steps = [record["step"] for record in held_out]
    loss.plot(steps, [r["loss"] for r in held_out], "C1o-", label="held out")
    loss.set(ylabel="cross-entropy (nats per token)", xlabel="step")
    for name, colour, label in (
        ("acceptance", "C2", "held out: drafts the frozen model accepts"),
        ("accuracy", "C3", "held out: drafts that are the text's token"),
    ):
        acceptance.plot(steps, [r[name] for r in held_out], f"{colour}o-", label=label)
    acceptance.set(ylabel="share of positions (greedy)", xlabel="step", ylim=(0, None))
    for axis in (loss, acceptance):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
