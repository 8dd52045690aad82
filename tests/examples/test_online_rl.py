"""The online RL example from the command line: its report, its proof, its refusals, two ranks.

    pytest tests/examples/test_online_rl.py

Runs on a machine without a GPU; about 40 seconds on one core.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.online_rl.__main__ import parse
from examples.online_rl.settings import PRESETS
from tests.support import launch

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--size", "tiny"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the example in a process of its own, on one rank."""
    command = [sys.executable, "-m", "examples.online_rl", *TINY, *arguments]
    command += ["--output", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's JSONL file."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """A whole run at the smallest size, and its folder."""
    folder = tmp_path_factory.mktemp("online_rl") / "new" / "folder"
    return run(folder), folder


def test_a_run_ends_well_and_says_where_its_report_is(tiny):
    result, folder = tiny
    assert result.returncode == 0, result.stderr
    assert f"report: {folder / 'online_rl.png'}" in result.stdout
    assert "GRPO with MTP" in result.stderr and "reward" in result.stderr  # the progress bar


def test_the_report_is_complete_and_nothing_unfinished_lies_beside_it(tiny):
    _, folder = tiny
    assert sorted(path.name for path in folder.iterdir()) == [
        "metrics.jsonl",
        "online_rl.png",
        "summary.json",
    ]
    assert (folder / "online_rl.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_every_step_has_a_line_with_reward_loss_and_acceptance_per_depth(tiny):
    _, folder = tiny
    size, lines = PRESETS["tiny"], metrics(folder)
    phases = ["warm_start"] * size.warm_steps + ["online"] * size.steps
    assert [line["phase"] for line in lines] == phases + ["check"] * size.check_steps
    for line in lines:
        assert math.isfinite(line["loss"])
        depths = 0 if line["phase"] == "check" else size.mtp_depths
        assert len(line["mtp_loss"]) == len(line["mtp_acceptance"]) == depths
        assert all(0 <= rate <= 1 for rate in line["mtp_acceptance"])
        assert line["phase"] == "warm_start" or 0 <= line["reward"] <= 1


def test_the_policy_is_bit_for_bit_that_of_the_run_without_mtp(tiny):
    result, folder = tiny
    isolation = json.loads((folder / "summary.json").read_text())["isolation"]
    assert isolation["passed"] and isolation["different"] == []
    assert isolation["steps"] == PRESETS["tiny"].check_steps
    assert isolation["parameters"] > 10 and isolation["optimizer_tensors"] > 20
    assert "isolation PASSED" in result.stdout


def test_without_isolation_the_check_fails_and_the_status_is_1(tmp_path):
    result = run(tmp_path, "--no-isolation", "--steps", "2", "--check-steps", "1")
    assert result.returncode == 1, result.stderr
    assert "isolation FAILED" in result.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["isolation"]["different"]


def test_two_ranks_that_share_every_sequence_learn_what_one_rank_learns(tiny, tmp_path):
    _, alone = tiny
    arguments = [*TINY, "--context-parallel-size", 2, "--output", tmp_path]
    launch("examples.online_rl", 2, arguments, timeout=300)
    one, two = metrics(alone), metrics(tmp_path)
    assert len(one) == len(two)
    for ours, theirs in zip(one, two):
        assert ours["samples_crc"] == theirs["samples_crc"]  # else losses are not comparable
        for name in ("loss", "policy_grad_norm", "heads_grad_norm", "mtp_loss", "mtp_acceptance"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), ours
    assert json.loads((tmp_path / "summary.json").read_text())["isolation"]["passed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--warm-steps", "-1"], "warm_steps must be at least 1, got -1"),
        (["--samples", "1"], "samples must be at least 2"),
        (["--seed", "-3"], "seed must not be negative"),
        (["--steps", "5", "--check-steps", "6"], "between 0 and steps (5), got 6"),
        (["--check-steps", "0"], "needs --check-steps of at least 1"),
        (["--context-parallel-size", "2"], "there are 1 ranks; start with `torchrun"),
        (["--output", __file__], "is a file"),
        (["--size", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as refusal:
        parse([*TINY, *arguments])
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_without_the_patched_megatron_it_says_so_instead_of_failing(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    command = [sys.executable, "-m", "examples.online_rl", *TINY, "--output", str(tmp_path / "out")]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert "Megatron without the patches" in result.stderr and "make demo" in result.stderr
    assert "Traceback" not in result.stderr


def test_fewer_steps_shorten_the_check_and_it_can_be_left_out():
    assert parse(["--steps", "7"])[0].check_steps == 7
    assert parse(["--no-verify-isolation"])[0].check_steps == 0
