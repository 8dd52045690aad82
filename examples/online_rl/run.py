"""A run from warm start to report, one seed after the other: what the command line starts."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from examples.online_rl.arms import FROZEN_ARM, ONLINE_ARM
from examples.online_rl.check_tables import check_lines
from examples.online_rl.journal import Journal
from examples.online_rl.judge import Checks
from examples.online_rl.page import write_page
from examples.online_rl.plots import draw
from examples.online_rl.record import FROZEN, ONLINE, StepRecord
from examples.online_rl.settings import Settings
from examples.online_rl.summary import describe, summarise, table
from examples.online_rl.trainer import Trainer
from examples.online_rl.verify import IsolationReport, Snapshot, compare
from megatron.core.process_groups_config import ProcessGroupCollection

PAGE, SUMMARY = "report.html", "summary.json"
CHECK_PROMPTS = 512  # held-out problems answered by the final heads of each arm


def run(settings: Settings, seeds: int, folder: Path, groups: ProcessGroupCollection) -> bool:
    """Run `seeds` seeds from `settings.seed` on and report; an interrupted run reports, too.

    Args:
        settings: all numbers of the run.
        seeds: how many.
        folder: where the report goes.
        groups: process groups of this rank.

    Returns:
        False if a policy is not that of the arm without MTP, else True.
    """
    began = time.perf_counter()
    writes = groups.cp.rank() == 0
    for name in (PAGE, SUMMARY) if writes else ():  # of an earlier run
        (folder / name).unlink(missing_ok=True)
    journal = Journal(folder, writes)
    outcomes: dict[int, tuple[IsolationReport, dict[str, Checks]]] = {}
    try:
        for seed in range(settings.seed, settings.seed + seeds):
            outcomes[seed] = _run_seed(replace(settings, seed=seed), journal, groups)
    finally:
        journal.close()
        if writes:
            seconds = time.perf_counter() - began
            _report(folder, settings, journal.records, outcomes, len(outcomes) == seeds, seconds)
    return all(isolation.passed for isolation, _ in outcomes.values())


def _run_seed(
    settings: Settings, journal: Journal, groups: ProcessGroupCollection
) -> tuple[IsolationReport, dict[str, Checks]]:
    """Warm start, then two runs from there that take turns; return their comparison, and what
    training expects of their drafts."""
    online, frozen = (Trainer(settings, groups, arm) for arm in (ONLINE_ARM, FROZEN_ARM))
    title, steps = f"seed {settings.seed}: ", settings.steps
    journal.watch(online.warm_start(), settings.warm_steps, title + "warm start")
    start = online.parameters()
    frozen.restore(start)
    arms = {
        ONLINE: online.reinforce(steps),
        FROZEN: frozen.reinforce(steps),
    }
    records = journal.watch(in_turn(arms), 2 * steps, title + "GRPO, 2 arms")
    snapshots = [
        Snapshot.of(trainer, [record for record in records if record.phase == arm])
        for trainer, arm in ((online, ONLINE), (frozen, FROZEN))
    ]
    checks = {
        trainer.arm.name: trainer.judge.check(trainer.policy_model, CHECK_PROMPTS)
        for trainer in (online, frozen)
    }
    return compare(*snapshots, start), checks


def in_turn(arms: dict[str, Iterator[StepRecord]]) -> Iterator[StepRecord]:
    """Take a step of every arm, then the next of every arm."""
    for records in zip(*arms.values(), strict=True):
        yield from records


def _report(
    folder: Path,
    settings: Settings,
    records: list[StepRecord],
    outcomes: dict[int, tuple[IsolationReport, dict[str, Checks]]],
    complete: bool,
    seconds: float,
) -> None:
    reinforced = [record for record in records if record.phase in (ONLINE, FROZEN)]
    seeds = sorted({record.seed for record in reinforced})
    summary: dict[str, Any] = {
        "complete": complete,
        "seconds": seconds,
        "settings": {**asdict(settings), "check_prompts": CHECK_PROMPTS},
        "seeds": [
            summarise([r for r in reinforced if r.seed == seed], *outcomes.get(seed, (None,)))
            for seed in seeds
        ],
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    if reinforced:
        write_page(folder / PAGE, summary, reinforced, draw(reinforced, folder))
    for seed in summary["seeds"]:
        print()
        for name, *values in table(seed):
            print(f"{name:<32}" + "".join(f"{value:>14}" for value in values))
        print("\n".join(describe(seed)))
    print("\n".join(check_lines(summary)))
    if reinforced:
        print(f"report: {(folder / PAGE).resolve()} and the files beside it")
    print(f"{seconds:.0f} s")
