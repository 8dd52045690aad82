"""One RL run with heads frozen and with heads trained by several objectives: what it finds.

Every arm is a whole run: a policy of its own, trained by its own forwards and backwards. Rollouts
are sampled once as long as the policies stay the same bit for bit (`SharedRollouts`), which the
comparison at the end demands of all of them.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from examples.online_rl.arms import Arm, SharedRollouts
from examples.online_rl.comparison_page import PAGE, draw_comparison, write_comparison
from examples.online_rl.comparison_tables import text_report
from examples.online_rl.journal import Journal
from examples.online_rl.judge import Checks, plain
from examples.online_rl.record import FROZEN, StepRecord
from examples.online_rl.run import in_turn
from examples.online_rl.settings import Settings
from examples.online_rl.summary import ROWS, averages
from examples.online_rl.trainer import Trainer
from examples.online_rl.verify import IsolationReport, Snapshot, compare
from megatron.core.process_groups_config import ProcessGroupCollection

SUMMARY = "summary.json"
MEANS = (*ROWS, "expected_length")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished seed left, by arm.

    Attributes:
        isolation: comparison of each trained arm's policy with the frozen arm's.
        checks: what drafts of the final heads were accepted, and what training expected.
        sampled: how often an arm sampled; the number of steps if all rollouts were shared.
    """

    isolation: dict[str, IsolationReport]
    checks: dict[str, Checks]
    sampled: int


def run(
    settings: Settings,
    arms: Sequence[Arm],
    seeds: int,
    check_prompts: int,
    folder: Path,
    groups: ProcessGroupCollection,
) -> bool:
    """Run all arms for `seeds` seeds and report; an interrupted run reports, too.

    Args:
        settings: all numbers of the run.
        arms: the frozen one first.
        seeds: how many, from `settings.seed` on.
        check_prompts: held-out problems answered by each arm's final heads.
        folder: where the report goes.
        groups: process groups of this rank.

    Returns:
        False if a policy is not that of the frozen arm, else True.
    """
    began = time.perf_counter()
    writes = groups.cp.rank() == 0
    for name in (PAGE, SUMMARY) if writes else ():  # of an earlier run
        (folder / name).unlink(missing_ok=True)
    journal = Journal(folder, writes)
    outcomes: dict[int, Outcome] = {}
    try:
        for seed in range(settings.seed, settings.seed + seeds):
            own = replace(settings, seed=seed)
            outcomes[seed] = _run_seed(own, arms, check_prompts, journal, groups)
    finally:
        journal.close()
        if writes:
            records = [r for r in journal.records if r.phase in {arm.name for arm in arms}]
            summary = {
                "complete": len(outcomes) == seeds,
                "seconds": time.perf_counter() - began,
                "settings": {**asdict(settings), "check_prompts": check_prompts},
                "arms": {arm.name: dict(arm.objective) for arm in arms},
                "seeds": summarise(records, arms, outcomes),
            }
            _report(folder, summary, records)
    return all(found.passed for out in outcomes.values() for found in out.isolation.values())


def _run_seed(
    settings: Settings,
    arms: Sequence[Arm],
    check_prompts: int,
    journal: Journal,
    groups: ProcessGroupCollection,
) -> Outcome:
    title, steps = f"seed {settings.seed}: ", settings.steps
    warm = Trainer(settings, groups)
    journal.watch(warm.warm_start(), settings.warm_steps, title + "warm start")
    start = warm.parameters()
    shared, trainers = SharedRollouts(), {}
    for arm in arms:
        trainers[arm.name] = Trainer(settings, groups, arm)
        trainers[arm.name].restore(start)
    running = {name: trainer.reinforce(steps, shared) for name, trainer in trainers.items()}
    total = len(arms) * steps
    records = journal.watch(in_turn(running), total, f"{title}GRPO, {len(arms)} arms")
    snapshots = {
        name: Snapshot.of(trainer, [record for record in records if record.phase == name])
        for name, trainer in trainers.items()
    }
    frozen = snapshots.pop(FROZEN)
    return Outcome(
        {name: compare(trained, frozen, start) for name, trained in snapshots.items()},
        {name: t.judge.check(t.policy_model, check_prompts) for name, t in trainers.items()},
        shared.samples,
    )


def summarise(
    records: list[StepRecord], arms: Sequence[Arm], outcomes: dict[int, Outcome]
) -> list[dict[str, Any]]:
    """Return the figures of every seed that took a step.

    "first" are means over the first tenth of the frozen arm's steps, "last" over the last tenth of
    each arm's, with the accepted lengths of its final heads. "isolation" and "checks" are None for
    a seed that did not get to its end.
    """
    found = []
    for seed in sorted({record.seed for record in records}):
        steps = {a.name: [r for r in records if (r.seed, r.phase) == (seed, a.name)] for a in arms}
        steps = {name: own for name, own in steps.items() if own}
        window = max(1, len(steps[FROZEN]) // 10)
        outcome = outcomes.get(seed)
        last = {name: averages(own[-window:], MEANS) for name, own in steps.items()}
        for name, ways in outcome.checks.items() if outcome else ():
            last[name]["final_length"] = ways["sampling"][0].measured
            last[name]["final_length_greedy"] = ways["greedy"][0].measured
        found.append(
            {
                "seed": seed,
                "window": window,
                "first": averages(steps[FROZEN][:window], MEANS),
                "last": last,
                "rollouts_sampled": outcome and outcome.sampled,
                "isolation": outcome
                and {
                    name: {**asdict(report), "passed": report.passed, "text": report.describe()}
                    for name, report in outcome.isolation.items()
                },
                "checks": outcome and plain(outcome.checks),
            }
        )
    return found


def _report(folder: Path, summary: dict[str, Any], records: list[StepRecord]) -> None:
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    if records:
        figure = draw_comparison(records, list(summary["arms"]), folder)
        write_comparison(folder / PAGE, summary, figure)
    print("\n".join(text_report(summary)))
    if records:
        print(f"report: {(folder / PAGE).resolve()} and the files beside it")
    print(f"{summary['seconds']:.0f} s")
