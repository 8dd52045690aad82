"""What a run writes while it goes: a line of JSON per step, TensorBoard's files, a progress bar."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from examples.online_rl.record import StepRecord

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"


class Journal:
    """The files of a run in one folder, complete up to the last step; silent on all ranks but one.

    Files of an earlier run in the folder are replaced.

    Args:
        folder: where they go; made if missing.
        writes: whether this rank writes and prints.
    """

    def __init__(self, folder: Path, writes: bool) -> None:
        self.records: list[StepRecord] = []
        self._folder = folder
        self._writes = writes
        self._boards: dict[str, SummaryWriter] = {}
        self._lines = None
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            for old in (folder / TENSORBOARD).glob("seed-*/*/events.out.tfevents.*"):
                old.unlink()
            self._lines = (folder / METRICS).open("w", buffering=1)  # a line at a time

    def watch(self, records: Iterator[StepRecord], total: int, title: str) -> list[StepRecord]:
        """Run `records` to its end behind a progress bar; write, keep and return them all."""
        first = len(self.records)
        quiet = not sys.stderr.isatty()  # a log file gets a line now and then, not a moving bar
        bar = tqdm(
            total=total,
            desc=f"{title:<22}",
            unit="step",
            disable=not self._writes,
            mininterval=10.0 if quiet else 0.1,
            dynamic_ncols=not quiet,
        )
        with bar:
            for record in records:
                self.records.append(record)
                if self._writes:
                    self._write(record)
                bar.set_postfix_str(_headline(record), refresh=False)
                bar.update()
        return self.records[first:]

    def close(self) -> None:
        """Write out what is buffered; the journal takes no more records."""
        if self._writes:
            self._lines.close()
        for board in self._boards.values():
            board.close()

    def _write(self, record: StepRecord) -> None:
        self._lines.write(json.dumps(asdict(record)) + "\n")
        name = f"seed-{record.seed}/{record.phase}"  # two arms make two curves of one plot
        if name not in self._boards:
            path = self._folder / TENSORBOARD / name
            self._boards[name] = SummaryWriter(str(path), flush_secs=10)
        for tag, value in _scalars(record):
            self._boards[name].add_scalar(tag, value, record.step)


def _scalars(record: StepRecord) -> Iterator[tuple[str, float]]:
    for name, value in asdict(record).items():
        if name in ("seed", "step") or name.endswith("_crc"):
            continue
        if isinstance(value, list):
            for depth, element in enumerate(value, start=1):
                yield f"{name}/depth_{depth}", element
        elif isinstance(value, (int, float)):
            yield name, value


def _headline(record: StepRecord) -> str:
    parts = [f"loss {record.loss:.3f}"] if record.reward is None else []
    if record.reward is not None:
        parts.append(f"reward {record.reward:.2f}, right {record.right:.2f}")
    if record.measured_length is not None:
        parts.append(f"{record.phase} heads: {record.measured_length:.2f} tokens a step")
    elif record.mtp_loss:
        parts.append("MTP loss " + "/".join(f"{value:.2f}" for value in record.mtp_loss))
    return ", ".join(parts)
