"""The comparison of objectives in the online RL example: one policy, several kinds of heads.

    pytest tests/examples/test_online_rl_objectives.py

Runs on a machine without a GPU.
"""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support import prepare

prepare()

from examples.online_rl.arms import OBJECTIVES, SharedRollouts, objective_arms
from examples.online_rl.comparison_tables import length_table
from examples.online_rl.objectives import ALL_ARMS, parse
from examples.online_rl.rollout import Rollouts
from examples.online_rl.settings import PRESETS

ROOT = Path(__file__).resolve().parents[2]
SIZE = PRESETS["tiny"]
TRAINED = ["ce", "kl", "chained-tv"]


def command(folder: Path, *arguments: str) -> list[str]:
    """The command line of a comparison at the smallest size."""
    program = [sys.executable, "-m", "examples.online_rl.objectives", "--size", "tiny"]
    return [*program, *arguments, "--check-prompts", "40", "--output", str(folder)]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the comparison in a process of its own."""
    return subprocess.run(
        command(folder, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """A whole run of two seeds, and its folder."""
    folder = tmp_path_factory.mktemp("objectives") / "new"
    return run(folder, "--seeds", "2", "--temperature", "0.8", "--arms", *TRAINED), folder


def arm(folder: Path, seed: int, name: str) -> list[dict]:
    """The lines of one arm of one seed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if (line["seed"], line["phase"]) == (seed, name)]


def test_a_run_ends_well_and_leaves_its_report(tiny):
    result, folder = tiny
    assert result.returncode == 0, result.stderr
    assert f"report: {folder / 'report.html'}" in result.stdout
    assert "seed 2: GRPO, 4 arms" in result.stderr  # the progress bar
    files = {path.name for path in folder.iterdir()}
    figures = {"objectives.png", "objectives.svg"}
    assert files == {"metrics.jsonl", "report.html", "summary.json", "tensorboard", *figures}
    assert (folder / "objectives.svg").read_text().rstrip().endswith("</svg>")
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert not re.search(r"https?:|//|<script", re.sub(r'"data:[^"]*"', "", page))
    for name in TRAINED:
        assert f"<td>{name}</td>" in page and f"<td>seed 2, {name}</td>" in page


def test_all_arms_have_one_policy_and_every_kind_of_heads_its_own(tiny):
    result, folder = tiny
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["complete"] and list(summary["arms"]) == ["frozen", *TRAINED]
    for seed in summary["seeds"]:
        assert seed["rollouts_sampled"] == SIZE.steps  # once a step, for all
        arms = {name: arm(folder, seed["seed"], name) for name in summary["arms"]}
        for name in TRAINED:
            isolation = seed["isolation"][name]
            assert isolation["passed"] and isolation["steps"] == SIZE.steps
            shared = ("reward", "samples_crc", "rewards_crc", "policy_grad_norm", "loss")
            for field in (*shared, "policy_change"):
                ours, theirs = ([line[field] for line in arms[one]] for one in (name, "frozen"))
                assert ours == theirs, field
        norms = [arms[name][0]["heads_grad_norm"] for name in summary["arms"]]
        assert norms[0] == 0 and len(set(norms)) == len(norms)
    assert result.stdout.count(f"{', '.join(TRAINED)}: isolation PASSED") == 2


def test_the_heads_teacher_has_the_rollouts_temperature(tiny):
    _, folder = tiny
    arms = json.loads((folder / "summary.json").read_text())["arms"]
    assert {fields["mtp_teacher_temperature"] for fields in arms.values()} == {0.8}
    # One forward on one text by heads that nobody has trained yet: by the same teacher.
    first = [arm(folder, 1, name)[0]["mtp_expected_acceptance"] for name in arms]
    assert first[0] == pytest.approx(first[1], rel=1e-5) and first[1:] == [first[1]] * 3


def test_what_training_expects_is_checked_for_every_arm(tiny):
    result, folder = tiny
    for seed in json.loads((folder / "summary.json").read_text())["seeds"]:
        assert list(seed["checks"]) == ["frozen", *TRAINED]
        for ways in seed["checks"].values():
            assert all(one["measured"] == one["expected"] for one in ways["greedy"])
            assert all(0 < one["margin"] < 0.5 for one in ways["sampling"])
    assert "greedy: 24 of 24 equal" in result.stdout


def test_without_isolation_the_arms_sample_for_themselves_and_the_status_is_1(tmp_path):
    result = run(tmp_path, "--no-isolation", "--steps", "2", "--seeds", "1", "--arms", "ce")
    assert result.returncode == 1, result.stderr
    [seed] = json.loads((tmp_path / "summary.json").read_text())["seeds"]
    assert not seed["isolation"]["ce"]["passed"]
    assert seed["rollouts_sampled"] == 3  # together in the first step, apart in the second


def test_an_interrupted_run_leaves_what_it_has(tmp_path):
    (tmp_path / "summary.json").write_text("of an earlier run")
    process = subprocess.Popen(
        command(tmp_path, "--steps", "100000", "--arms", "ce"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    written, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 240
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if written.exists() and '"ce"' in written.read_text():
                break
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 143
    finally:
        process.kill()
    summary = json.loads((tmp_path / "summary.json").read_text())
    [seed] = summary["seeds"]
    assert not summary["complete"] and seed["checks"] is None and seed["isolation"] is None
    assert "stopped early" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "objectives.png").exists()


# --- parts ---


def sampler(token: int, calls: list[int]):
    """Rollouts of one token, and a note of the call."""

    def sample() -> Rollouts:
        calls.append(token)
        return Rollouts(torch.tensor([[token]]), torch.ones(1, 1).bool(), torch.zeros(1, 1))

    return sample


def test_rollouts_are_shared_by_equal_policies_of_one_step_only():
    shared, calls = SharedRollouts(), []
    policy = {"w": torch.zeros(2)}
    first = shared.take(1, policy, sampler(1, calls))
    assert shared.take(1, {"w": torch.zeros(2)}, sampler(2, calls)) is first
    other = shared.take(1, {"w": torch.tensor([0.0, -0.0])}, sampler(3, calls))
    assert int(other.tokens_BS) == 3
    assert shared.take(1, policy, sampler(4, calls)) is first  # still there
    policy["w"] += 1.0  # what was sampled from is a copy
    assert int(shared.take(1, policy, sampler(5, calls)).tokens_BS) == 5
    assert int(shared.take(2, {"w": torch.zeros(2)}, sampler(6, calls)).tokens_BS) == 6
    assert calls == [1, 3, 5, 6] and shared.samples == 4


def test_every_objective_can_be_an_arm_and_the_frozen_one_leads():
    assert list(OBJECTIVES) == list(ALL_ARMS)
    frozen, *trained = objective_arms(ALL_ARMS, 0.5)
    assert not frozen.trains_heads and all(one.trains_heads for one in trained)
    assert len({json.dumps(dict(one.objective)) for one in trained}) == len(ALL_ARMS)


def test_the_table_gives_leads_seed_by_seed():
    values = {"frozen": (2.0, 2.1), "ce": (2.2, 2.4), "kl": (2.3, None)}
    seeds = [
        {"seed": 1 + i, "last": {name: {"measured_length": v[i]} for name, v in values.items()}}
        for i in range(2)
    ]
    rows = length_table({"seeds": seeds, "arms": dict.fromkeys(values)}, "measured_length")
    assert rows[0][1:] == ("seed 1", "seed 2", "mean", "over frozen", "over ce")
    assert rows[2] == ("ce", "2.200", "2.400", "2.300", "+0.250 (+0.200 … +0.300)", "")
    assert rows[3] == ("kl", "2.300", "", "2.300", "+0.300", "+0.100")
    assert length_table({"seeds": seeds, "arms": dict.fromkeys(values)}, "final_length") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "rl"], "invalid choice: 'rl'"),
        (["--arms", "ce", "ce"], "--arms names an objective twice: ce ce"),
        (["--check-prompts", "1"], "--check-prompts must be at least 2, got 1"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        parse(arguments)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err
