"""The online RL example from the command line: its arms, its files, its refusals, two ranks.

    pytest tests/examples/test_online_rl.py

Runs on a machine without a GPU.
"""

import base64
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.online_rl.__main__ import parse
from examples.online_rl.settings import PRESETS
from tests.support import launch
from tools.docs_site import browser

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--size", "tiny"]


SIZE = PRESETS["tiny"]
ARMS = ("online", "frozen")


def command(folder: Path, *arguments: str) -> list[str]:
    """The command line of a run at the smallest size, on one rank."""
    program = [sys.executable, "-m", "examples.online_rl", *TINY]
    return [*program, *arguments, "--output", str(folder)]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the example in a process of its own."""
    return subprocess.run(
        command(folder, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's JSONL file."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """A whole run of two seeds at the smallest size, and its folder."""
    folder = tmp_path_factory.mktemp("online_rl") / "new" / "folder"
    return run(folder, "--seeds", "2"), folder


def arm(folder: Path, seed: int, name: str) -> list[dict]:
    """The lines of one arm of one seed."""
    return [line for line in metrics(folder) if (line["seed"], line["phase"]) == (seed, name)]


def test_a_run_ends_well_and_says_where_its_report_is(tiny):
    result, folder = tiny
    assert result.returncode == 0, result.stderr
    assert f"report: {folder / 'report.html'}" in result.stdout
    assert "seed 2: GRPO, 2 arms" in result.stderr  # the progress bar


def test_the_report_is_complete_and_nothing_unfinished_lies_beside_it(tiny):
    _, folder = tiny
    plots = ["accepted_length.png", "heads.png", "policy.png"]
    others = ["metrics.jsonl", "report.html", "summary.json", "tensorboard"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(plots + others)
    for plot in plots:
        assert (folder / plot).read_bytes().startswith(b"\x89PNG\r\n")
    assert json.loads((folder / "summary.json").read_text())["complete"]


def test_the_page_needs_no_other_file_and_no_network(tiny):
    _, folder = tiny
    page = (folder / "report.html").read_text()
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    plots = ["accepted_length.png", "policy.png", "heads.png"]
    assert [base64.b64decode(i) for i in images] == [(folder / p).read_bytes() for p in plots]
    rest = re.sub(r'"data:[^"]*"', "", page)
    assert not re.search(r"https?:|//|url\(|@import|<script|<iframe|<object", rest)
    assert not re.search(r"(?:src|href)=[^>]", rest)  # what they refer to was data
    assert "seed 1" in page and "seed 2" in page and "stopped early" not in page


@pytest.mark.skipif(browser.find() is None, reason="there is no Chromium")
def test_the_page_opens_in_a_browser_with_its_pictures_and_without_complaint(tiny, tmp_path):
    _, folder = tiny
    seen = browser.look((folder / "report.html").as_uri())
    assert (seen.console, seen.asked) == ([], [])
    text = re.sub(r'"data:[^"]*"', "", seen.dom)
    assert text.count("<img") == 3 and "seed 2" in text
    picture = tmp_path / "report.png"
    browser.look((folder / "report.html").as_uri(), picture)
    assert picture.stat().st_size > 30_000  # an empty page of this size is below 10 kB


def test_every_step_of_both_arms_has_a_line_with_what_it_measured(tiny):
    _, folder = tiny
    lines = metrics(folder)
    phases = ["warm_start"] * SIZE.warm_steps + ["online", "frozen"] * SIZE.steps
    assert [(line["seed"], line["phase"]) for line in lines] == [
        (seed, phase) for seed in (1, 2) for phase in phases
    ]
    for line in lines:
        assert math.isfinite(line["loss"])
        measures = line["step"] in (1, 2, 4) and line["phase"] != "warm_start"
        for name in ("measured_length", "measured_length_greedy"):
            assert (line[name] is not None) == measures
            assert not measures or 1 <= line[name] <= 1 + SIZE.mtp_depths
        has_run = measures or line["phase"] != "frozen"
        assert len(line["mtp_loss"]) == len(line["mtp_acceptance"]) == SIZE.mtp_depths * has_run
        assert (line["estimated_length"] is not None) == has_run
        assert line["phase"] == "warm_start" or 0 <= line["reward"] <= line["right"] <= 1


def test_tensorboard_has_a_curve_for_each_arm(tiny):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = tiny
    for name in ARMS:
        board = EventAccumulator(str(folder / "tensorboard" / "seed-2" / name))
        board.Reload()
        rewards = [(event.step, event.value) for event in board.Scalars("reward")]
        lines = arm(folder, 2, name)
        assert rewards == [(line["step"], pytest.approx(line["reward"])) for line in lines]
        assert [e.step for e in board.Scalars("measured_length")] == [1, 2, 4]


def test_both_arms_have_the_same_policy_tokens_and_rewards_and_other_heads(tiny):
    result, folder = tiny
    for seed in json.loads((folder / "summary.json").read_text())["seeds"]:
        isolation = seed["isolation"]
        assert isolation["passed"] and isolation["different"] == []
        assert isolation["steps"] == SIZE.steps
        assert isolation["parameters"] > 10 and isolation["optimizer_tensors"] > 20
        online, frozen = (arm(folder, seed["seed"], name) for name in ARMS)
        shared = ("reward", "right", "samples_crc", "rewards_crc", "policy_grad_norm", "loss")
        for name in (*shared, "policy_change", "example"):
            assert [line[name] for line in online] == [line[name] for line in frozen], name
        assert online[0]["measured_length"] == frozen[0]["measured_length"]  # no step yet
        assert online[-1]["mtp_loss"][0] < frozen[-1]["mtp_loss"][0]  # on the same tokens
        assert all(line["heads_grad_norm"] == 0 for line in frozen)
    assert result.stdout.count("isolation PASSED") == 2


def test_what_training_expects_of_drafts_stands_beside_what_was_measured(tiny):
    result, folder = tiny
    for seed in json.loads((folder / "summary.json").read_text())["seeds"]:
        assert list(seed["checks"]) == list(ARMS)
        for ways in seed["checks"].values():
            assert [len(ways[way]) for way in ("sampling", "greedy")] == [1 + SIZE.mtp_depths] * 2
            assert all(one["measured"] == one["expected"] for one in ways["greedy"])
            for one in ways["sampling"]:  # 99%; that all lie inside is for the test of the parts
                assert abs(one["measured"] - one["expected"]) < 2 * one["margin"] < 0.3
    assert "expected and measured, greedy: 12 of 12 equal" in result.stdout
    assert "<td>seed 2, frozen</td>" in (folder / "report.html").read_text()


def test_without_isolation_the_comparison_fails_and_the_status_is_1(tmp_path):
    result = run(tmp_path, "--no-isolation", "--steps", "1")
    assert result.returncode == 1, result.stderr
    assert "isolation FAILED" in result.stdout
    [seed] = json.loads((tmp_path / "summary.json").read_text())["seeds"]
    assert seed["isolation"]["different"]


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_what_it_has(sent, status, tmp_path):
    (tmp_path / "summary.json").write_text("of an earlier run")
    process = subprocess.Popen(
        command(tmp_path, "--steps", "100000"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while process.poll() is None:
            written = tmp_path / "metrics.jsonl"
            if written.exists() and '"frozen"' in written.read_text():
                break
            time.sleep(0.2)
        process.send_signal(sent)
        assert process.wait(timeout=120) == status
    finally:
        process.kill()
    lines = metrics(tmp_path)  # every line is whole
    assert lines[-1]["phase"] in ARMS
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not summary["complete"] and summary["seeds"][0]["isolation"] is None
    assert "stopped early" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "accepted_length.png").exists()
    assert list((tmp_path / "tensorboard").glob("seed-1/*/events*"))


def test_two_ranks_that_share_every_sequence_learn_what_one_rank_learns(tiny, tmp_path):
    _, both_seeds = tiny
    arguments = [*TINY, "--context-parallel-size", 2, "--output", tmp_path]
    launch("examples.online_rl", 2, arguments, timeout=300)
    one = [line for line in metrics(both_seeds) if line["seed"] == 1]
    two = metrics(tmp_path)
    assert len(one) == len(two)
    for ours, theirs in zip(one, two):
        assert ours["samples_crc"] == theirs["samples_crc"]  # else losses are not comparable
        for name in ("loss", "policy_grad_norm", "heads_grad_norm", "mtp_loss", "mtp_acceptance"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), ours
    [seed] = json.loads((tmp_path / "summary.json").read_text())["seeds"]
    assert seed["isolation"]["passed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--warm-steps", "-1"], "warm_steps must be at least 1, got -1"),
        (["--samples", "1"], "samples must be at least 2"),
        (["--seed", "-3"], "seed must not be negative"),
        (["--temperature", "0"], "temperature must be above 0 and finite, got 0.0"),
        (["--temperature", "nan"], "temperature must be above 0 and finite, got nan"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
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
