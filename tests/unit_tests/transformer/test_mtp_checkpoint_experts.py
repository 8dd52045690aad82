"""Optimizer state of experts between one expert-parallel rank and several, both ways.

    python -m pytest tests/unit_tests/transformer/test_mtp_checkpoint_experts.py
"""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.support import checkpoints, prepare, run_ranks
from tests.support.checkpoints import Setting, contents, differing, rewrite, write
from tests.support.claims import supports
from tests.support.unpatched import NoUnpatchedTree, faulty_tree, run_in_tree

prepare()

from megatron.core.optimizer.chained_layout import match_layout

OPTIMIZERS = ("fp32", "bf16", "distributed")
# (ranks, expert-parallel ranks among them) before and after
RESHARDINGS = {
    "ep 1 to 2": ((1, 1), (2, 2)),
    "ep 2 to 1": ((2, 2), (1, 1)),
    "ep 1 to 2 on 2 ranks": ((2, 1), (2, 2)),
    "ep 4 to 1 on 4 ranks": ((4, 4), (4, 1)),
}
CASES = [(name, optimizer) for name in list(RESHARDINGS)[:2] for optimizer in OPTIMIZERS]
CASES += [(name, "distributed") for name in list(RESHARDINGS)[2:]]


def run(action, split, setting, *paths, steps=None):
    ranks, ep = split
    options = () if steps is None else (steps,)
    run_ranks(action, ranks, setting, *paths, dict(ep=ep), *options)


@supports("Checkpoints", equal="what was saved", ranks="1 to 4", dtype="float32 and bfloat16")
@pytest.mark.parametrize("name, optimizer", CASES)
def test_resharding_keeps_the_state_of_experts(tmp_path, name, optimizer):
    before, after = RESHARDINGS[name]
    setting = Setting(optimizer=optimizer, num_experts=4)
    run(write, before, setting, tmp_path / "first")
    run(rewrite, after, setting, tmp_path / "first", tmp_path / "second")
    saved = contents(tmp_path / "first")
    assert any("exp_avg.mtp.layers" in name and ".experts." in name for name in saved)
    assert differing(tmp_path / "first", tmp_path / "second") == []


@supports(
    "Checkpoints", equal="the run that was not interrupted", ranks=2, dtype="float32 and bfloat16"
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids="resumed after ep 1 to 2 to 1, {}".format)
def test_a_run_that_went_through_another_layout_continues_bit_for_bit(tmp_path, optimizer):
    """Step and settings of the groups came along: they are no tensors of the checkpoint."""
    setting, one, two = Setting(optimizer=optimizer, num_experts=4), (2, 1), (2, 2)
    run(write, one, setting, tmp_path / "half", steps=range(2))
    run(rewrite, two, setting, tmp_path / "half", tmp_path / "there")
    run(rewrite, one, setting, tmp_path / "there", tmp_path / "resumed", steps=range(2, 4))
    run(rewrite, one, setting, tmp_path / "half", tmp_path / "straight", steps=range(2, 4))
    assert differing(tmp_path / "half", tmp_path / "straight") != []
    assert differing(tmp_path / "straight", tmp_path / "resumed") == []


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory) -> Path:
    """A tree without the series."""
    try:
        return faulty_tree(tmp_path_factory.mktemp("tree"))
    except NoUnpatchedTree as reason:
        pytest.skip(str(reason))


def in_tree(tree: Path, *actions: tuple) -> None:
    """Let ``tree`` write or rewrite on one rank."""
    encoded = [[a.__name__, dataclasses.asdict(s), *map(str, paths)] for a, s, *paths in actions]
    run_in_tree(tree, Path(checkpoints.__file__), [json.dumps(encoded)])


def test_files_of_the_release_below_load_in_another_layout_and_ours_load_there(
    tmp_path, unpatched
):
    """There and back: one rank unpatched, two ranks here, one here, one unpatched again."""
    settings = [Setting(optimizer=o, num_experts=4, isolated=False) for o in OPTIMIZERS]
    theirs, two, ours, there = (tmp_path / name for name in ("theirs", "two", "ours", "there"))
    in_tree(unpatched, *((write, s, theirs / s.optimizer) for s in settings))
    for setting in settings:
        name = setting.optimizer
        run(rewrite, (2, 2), setting, theirs / name, two / name)
        run(rewrite, (1, 1), setting, two / name, ours / name)
    in_tree(
        unpatched, *((rewrite, s, ours / s.optimizer, there / s.optimizer) for s in settings)
    )
    for setting in settings:
        assert differing(theirs / setting.optimizer, there / setting.optimizer) == []


def test_the_release_below_refuses_optimizer_state_of_another_layout(tmp_path, unpatched):
    setting = Setting(num_experts=4, isolated=False)
    run(write, (2, 2), setting, tmp_path / "two")
    with pytest.raises(AssertionError, match="Could not find parameter group"):
        in_tree(unpatched, (rewrite, setting, tmp_path / "two", tmp_path / "failed"))


class _Optimizer:
    def __init__(self, *groups):
        self.param_groups = [dict(group, params=[]) for group in groups]


KEYS = ("max_lr", "wd_mult", "is_expert_parallel")
DENSE = dict(max_lr=0.1, wd_mult=1.0, is_expert_parallel=False)
EXPERTS = dict(DENSE, is_expert_parallel=True)


@pytest.mark.parametrize(
    "state", [{0: {"a": 1}, 1: {"a": 2}}, {"state": {}, "param_groups": []}, [{"a": 1}, {"a": 2}]]
)
def test_state_in_one_form_is_left_alone(state):
    assert match_layout(state, [_Optimizer(), _Optimizer()], KEYS) is state


def test_experts_take_the_settings_of_the_group_they_were_in():
    state = {
        0: {"state": {0: "m0"}, "param_groups": [{"params": [0]}]},
        1: {"state": {0: "m1"}, "param_groups": [{"params": [0]}]},
        "state": {"common_step": 7},
        "param_groups": [dict(DENSE, lr=0.5)],
    }
    found = match_layout(state, [_Optimizer(DENSE), _Optimizer(EXPERTS)], KEYS)
    assert found == {
        0: {
            "state": {0: "m0", "common_step": 7},
            "param_groups": [dict(DENSE, lr=0.5, params=[0])],
        },
        1: {
            "state": {0: "m1", "common_step": 7},
            "param_groups": [dict(EXPERTS, lr=0.5, params=[0])],
        },
    }


def test_a_group_that_was_not_saved_is_refused():
    state = {0: {"param_groups": [dict(DENSE)]}, 1: {"param_groups": [dict(EXPERTS)]}, "state": {}}
    with pytest.raises(ValueError, match="no parameter group with {'max_lr': 0.2, 'wd_mult': 1.0}"):
        match_layout(state, [_Optimizer(dict(DENSE, max_lr=0.2))], KEYS)
