"""Distributed checkpoints: heads and optimizer state survive resharding, other trees and resuming.

    python -m pytest tests/unit_tests/transformer/test_mtp_checkpoint.py

A checkpoint that was loaded is written again, and the two are compared tensor by tensor: every
parameter and every optimizer state, whole, in the format's own reading.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.support import checkpoints, prepare, run_ranks
from tests.support.checkpoints import Setting, contents, differing, ranks_of, resume
from tests.support.checkpoints import rewrite, write
from tests.support.claims import supports
from tests.support.unpatched import NoUnpatchedTree, run_in_tree, unpatched_tree

prepare()


RESHARDINGS = {
    "tp 1 to 2": ({}, dict(tp=2)),
    "pp 2 to 1": (dict(pp=2), {}),
    "ep 2 to 4": (dict(ep=2), dict(ep=4)),
    "tp 2 to 1": (dict(tp=2), {}),
    "pp 1 to 2": ({}, dict(pp=2)),
    "ep 4 to 2": (dict(ep=4), dict(ep=2)),
}
CASES = [(n, o) for n in list(RESHARDINGS)[:3] for o in ("fp32", "bf16", "distributed")]
CASES += [(n, "fp32") for n in list(RESHARDINGS)[3:]]


@supports("Checkpoints", equal="what was saved", ranks="1 to 4", dtype="float32 and bfloat16")
@pytest.mark.parametrize("name, optimizer", CASES)
def test_resharding_keeps_every_tensor_of_model_and_optimizer(tmp_path, name, optimizer):
    before, after = RESHARDINGS[name]
    experts = 4 if "ep" in name else 0
    setting = Setting(optimizer=optimizer, num_experts=experts)
    run_ranks(write, ranks_of(before), setting, tmp_path / "first", before)
    run_ranks(rewrite, ranks_of(after), setting, tmp_path / "first", tmp_path / "second", after)
    assert any("exp_avg.mtp.layers" in name for name in contents(tmp_path / "first"))
    assert differing(tmp_path / "first", tmp_path / "second") == []


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.parametrize("kind", ["distinct", "repeated", "tied"])
def test_both_models_and_kinds_of_heads_reshard(tmp_path, family, kind):
    setting = Setting(family=family, tied=kind == "tied", repeated=kind == "repeated")
    run_ranks(write, 2, setting, tmp_path / "first", dict(tp=2))
    run_ranks(rewrite, 1, setting, tmp_path / "first", tmp_path / "second", {})
    assert differing(tmp_path / "first", tmp_path / "second") == []


@supports(
    "Checkpoints", equal="the run that was not interrupted", ranks=2, dtype="float32 and bfloat16"
)
@pytest.mark.parametrize(
    "optimizer", ["fp32", "bf16", "distributed", "distributed-dp"], ids="resumed, {}".format
)
def test_a_resumed_run_continues_bit_for_bit(tmp_path, optimizer):
    """With attention dropout in policy and heads, and clipping."""
    run_ranks(resume, 2, Setting(optimizer=optimizer, generators=True), tmp_path, {})
    assert changed_by_resuming(tmp_path) == []


def changed_by_resuming(directory: Path) -> list[str]:
    """Names of what a resumed run ends with otherwise than one that was not interrupted."""
    half, straight, resumed = (
        comparable(directory / name) for name in ("half", "straight", "resumed")
    )
    assert straight.keys() == resumed.keys()
    moved = {n for n in straight if not torch.equal(straight[n], half[n])}
    assert any(n.startswith("mtp.layers") for n in moved)
    return [n for n in straight if not torch.equal(straight[n], resumed[n])]


def comparable(directory: Path) -> dict[str, torch.Tensor]:
    """All but the distributed optimizer's raw buffers, whose padding nobody writes."""
    return {n: value for n, value in contents(directory).items() if ".gbuf_idx_" not in n}


# The release below the series

TREES = [
    Setting(isolated=False),
    Setting(tied=True, isolated=False),
    Setting(family="hybrid", isolated=False),
]


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory) -> Path:
    """A tree without the series."""
    try:
        return unpatched_tree(tmp_path_factory.mktemp("tree"))
    except NoUnpatchedTree as reason:
        pytest.skip(str(reason))


def run_action(tree: Path, *actions: tuple) -> None:
    """Let ``tree`` write or rewrite checkpoints in a process of its own."""
    encoded = [[a.__name__, dataclasses.asdict(s), *map(str, paths)] for a, s, *paths in actions]
    run_in_tree(tree, Path(checkpoints.__file__), [json.dumps(encoded)])


def test_checkpoints_of_the_release_below_load_here_and_ours_load_there(tmp_path, unpatched):
    """Unpatched writes, we rewrite; we write (isolated), unpatched rewrites: nothing changes."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    isolated = [dataclasses.replace(setting, isolated=True) for setting in TREES]
    for i, setting in enumerate(isolated):
        run_ranks(write, 1, setting, ours / str(i), {})
    actions = [(write, s, theirs / str(i)) for i, s in enumerate(TREES)]
    actions += [(rewrite, s, ours / str(i), ours / f"{i}-there") for i, s in enumerate(TREES)]
    run_action(unpatched, *actions)
    for i, setting in enumerate(isolated):
        run_ranks(rewrite, 1, setting, theirs / str(i), theirs / f"{i}-here", {})
        assert differing(theirs / str(i), theirs / f"{i}-here") == []
        assert differing(ours / str(i), ours / f"{i}-there") == []


def test_the_release_below_resumes_with_a_wrong_step_of_torchs_adam(tmp_path, unpatched):
    """What the test of resuming would find there, with both formats of optimizer state."""
    settings = [Setting(optimizer=o, isolated=False) for o in ("distributed", "distributed-dp")]
    run_action(unpatched, *((resume, s, tmp_path / s.optimizer) for s in settings))
    for setting in settings:
        assert changed_by_resuming(tmp_path / setting.optimizer)
