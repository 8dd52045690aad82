"""One run from warm start to report: what the command line starts."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from examples.online_rl.report import PLOT, Report, averages
from examples.online_rl.settings import Settings
from examples.online_rl.trainer import StepRecord, Trainer
from examples.online_rl.verify import IsolationReport, Snapshot, compare
from megatron.core.process_groups_config import ProcessGroupCollection


def run(settings: Settings, folder: Path, groups: ProcessGroupCollection) -> bool:
    """Warm start, GRPO with MTP, the proof and the report.

    Args:
        settings: all numbers of the run.
        folder: where the report goes.
        groups: process groups of this rank.

    Returns:
        False if the policy is not that of the run without MTP, else True.
    """
    began = time.perf_counter()
    is_first = groups.cp.rank() == 0
    report = Report(folder, writes=is_first)
    trainer = Trainer(settings, groups)
    report.watch(trainer.warm_start(), settings.warm_steps, "warm start")
    start = trainer.parameters()
    online, snapshot = _online(trainer, report)
    isolation = None
    if snapshot is not None:
        trainer.restore(start)
        isolation = _check(trainer, report, snapshot, start)
    summary = _summary(settings, online, isolation, time.perf_counter() - began)
    report.save(summary, online)
    if is_first:
        print(_text(summary, folder))
    return isolation is None or isolation.passed


def _online(trainer: Trainer, report: Report) -> tuple[list[StepRecord], Snapshot | None]:
    """GRPO with MTP; also the state after `check_steps` steps, if there is a check."""
    settings, seen, kept = trainer.settings, [], []

    def steps():
        for record in trainer.reinforce(settings.steps, train_heads=True):
            seen.append(record)
            if record.step == settings.check_steps:
                kept.append(Snapshot.of(trainer, seen))
            yield record

    records = report.watch(steps(), settings.steps, "GRPO with MTP")
    return records, kept[0] if kept else None


def _check(
    trainer: Trainer, report: Report, with_mtp: Snapshot, start: dict[str, Any]
) -> IsolationReport:
    """The same first steps without MTP, and the comparison."""
    steps = trainer.settings.check_steps
    records = report.watch(
        trainer.reinforce(steps, train_heads=False), steps, "the same without MTP"
    )
    return compare(with_mtp, Snapshot.of(trainer, records), start)


def _summary(
    settings: Settings,
    online: list[StepRecord],
    isolation: IsolationReport | None,
    seconds: float,
) -> dict[str, Any]:
    window = max(1, min(10, len(online) // 2))
    return {
        "settings": dataclasses.asdict(settings),
        "window": window,
        "first": averages(online[:window]),
        "last": averages(online[-window:]),
        "policy_change": online[-1].policy_change,
        "isolation": None
        if isolation is None
        else {**dataclasses.asdict(isolation), "passed": isolation.passed},
        "isolation_text": None if isolation is None else isolation.describe(),
        "seconds": seconds,
    }


def _text(summary: dict[str, Any], folder: Path) -> str:
    first, last, window = summary["first"], summary["last"], summary["window"]
    rows = [
        ("right answers (reward)", first["reward"], last["reward"]),
        ("answers that show the working", first["working"], last["working"]),
    ]
    for depth, pair in enumerate(zip(first["mtp_loss"], last["mtp_loss"]), start=1):
        rows.append((f"MTP loss, depth {depth}", *pair))
    for depth, pair in enumerate(zip(first["mtp_acceptance"], last["mtp_acceptance"]), start=1):
        rows.append((f"MTP acceptance, depth {depth}", *pair))
    lines = ["", f"{'mean over ' + str(window) + ' steps':<32}{'first':>8}{'last':>8}"]
    lines += [f"{name:<32}{before:>8.3f}{after:>8.3f}" for name, before, after in rows]
    lines.append(f"the policy's parameters moved by {summary['policy_change']:.1%}")
    if summary["isolation"] is None:
        lines.append("isolation: not checked")
    else:
        verdict = "PASSED" if summary["isolation"]["passed"] else "FAILED"
        lines.append(f"isolation {verdict}: {summary['isolation_text']}")
    lines.append(f"report: {(folder / PLOT).resolve()} and the files beside it")
    lines.append(f"{summary['seconds']:.0f} s")
    return "\n".join(lines)
