"""The smallest trainer: heads learn, and the split over ranks changes nothing.

Run: pytest tests/examples/test_trainer_step.py
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.device import has_transformer_engine, prepare

prepare()

from examples.trainer_step.trainer import train  # noqa: E402
from tests.support.parallel import parallel_world  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
no_float64 = pytest.mark.skipif(has_transformer_engine(), reason="its attention has no float64")


def records(cp: int, steps: int, fields: dict) -> list[dict[str, float]]:
    """What training in float64 records, in a world of all ranks."""
    with parallel_world(cp=cp):
        return train(steps, torch.float64, **fields)


@no_float64
@pytest.mark.parametrize(
    "fields", [{}, dict(mtp_objective="kl", mtp_loss_chunk_size=16)], ids=["ce", "kl"]
)
@pytest.mark.parametrize(("ranks", "cp"), [(2, 2), (2, 1), (4, 2)], ids=["CP 2", "DP 2", "both"])
def test_ranks_record_what_one_rank_records(ranks, cp, fields):
    alone = records(1, 3, fields)
    for together in run_ranks(records, ranks, cp, 3, fields, timeout=120):
        for ours, theirs in zip(together, alone, strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours:
                assert math.isclose(ours[name], theirs[name], rel_tol=1e-12), name


def test_the_heads_learn():
    with parallel_world():
        said = train(15)
    assert said[-1]["mtp_accepted_length"] > said[0]["mtp_accepted_length"] + 0.5
    assert said[-1]["mtp_2_loss"] < 0.7 * said[0]["mtp_2_loss"]


def test_the_policy_is_the_one_of_other_heads():
    losses = []
    for scale in (1.0, 0.1):
        with parallel_world():
            said = train(3, mtp_objective="ce", mtp_depth_weights=[scale, 1.0])
        losses.append([(record["loss"], record["mtp_1_loss"]) for record in said])
    (first, others) = losses
    assert [policy for policy, _ in first] == [policy for policy, _ in others]
    assert [head for _, head in first] != [head for _, head in others]


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    """Runs the example as a reader does."""
    return subprocess.run(
        [sys.executable, "-m", "examples.trainer_step", *arguments],
        cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=240,
    )


def test_the_command_prints_a_line_per_step():
    done = command("--steps", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["1", "2"]
    assert "mtp_accepted_length" in lines[-1]


@pytest.mark.parametrize("size", ["2", "0"])
def test_a_context_parallel_size_without_its_ranks_is_refused(size):
    done = command("--context-parallel-size", size)
    assert done.returncode == 2
    assert f"--context-parallel-size {size} does not divide the 1 ranks; start with" in done.stderr


def test_more_data_parallel_ranks_than_microbatches_are_refused():
    done = command(WORLD_SIZE="3")
    assert done.returncode == 2
    assert "3 data-parallel ranks are too many for 2 microbatches; start fewer" in done.stderr


def test_without_megatron_on_the_path_it_says_so():
    done = command(PYTHONPATH=".")
    assert done.returncode == 2
    assert done.stderr.startswith("error: Megatron is not on the path (run make tree, and set")
