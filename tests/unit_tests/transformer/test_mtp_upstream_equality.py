"""With default flags the series changes nothing: outputs, gradients and metrics to the last bit.

One script records what a tree computes (`tests.support.recording`); it runs once on the patched
tree and once on the release below the series, on one rank, unpadded, without ignored labels. What
the series repairs lies outside of that, and has tests of its own.
"""

from pathlib import Path

import pytest
import torch

from tests.support import prepare, recording
from tests.support.release import counts_acceptance, loss_key, require_derived_targets
from tests.support.unpatched import NoUnpatchedTree, patched_tree, run_in_tree, unpatched_tree

prepare()

OBJECTIVE = Path("megatron/core/transformer/mtp_objective")
FAMILIES = ("gpt", "hybrid")


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> dict[str, Path]:
    """The two trees to compare."""
    try:
        unpatched = unpatched_tree(tmp_path_factory.mktemp("unpatched"))
    except NoUnpatchedTree as reason:
        pytest.skip(str(reason))
    return {"patched": patched_tree(), "unpatched": unpatched}


@pytest.fixture(scope="module")
def recorded(trees, tmp_path_factory) -> dict[str, dict]:
    """What each of them computes."""
    directory = tmp_path_factory.mktemp("recorded")
    results = {}
    for name, tree in trees.items():
        output = directory / f"{name}.pt"
        env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for deterministic gradients on a GPU
        run_in_tree(tree, Path(recording.__file__), [output], env)
        results[name] = torch.load(output)
    return results


def test_each_tree_computed_with_its_own_megatron_and_only_one_is_patched(trees, recorded):
    for name, tree in trees.items():
        assert Path(recorded[name]["core"]).resolve().is_relative_to(tree.resolve())
    assert (trees["patched"] / OBJECTIVE).is_dir()
    assert not (trees["unpatched"] / OBJECTIVE).exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_of_every_case_are_upstreams_bit_for_bit(recorded, family):
    names = _names(recorded, family, ": output")
    assert len(names) == len(list(recording.model_specs())) // 2 * 2 * 6
    assert _different(recorded, names) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_every_training_case_are_upstreams_bit_for_bit(recorded, family):
    names = [name for name in _names(recorded, family, ": gradient of ") if "/train/" in name]
    assert any(".mtp." in f".{name.split(' of ')[1]}" for name in names)
    assert _different(recorded, names) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_eval_mode_are_upstreams_bit_for_bit_when_labels_are_given(recorded, family):
    names = _names(recorded, family, ": gradient of ")
    names = [name for name in names if "/eval/" in name and "/no-labels" not in name]
    assert names
    assert _different(recorded, names) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_eval_mode_differ_in_gradients_of_the_skipped_heads_alone(recorded, family):
    """The one difference by default: nobody can use what the heads would compute there."""
    require_derived_targets()
    names = [
        name
        for name in _names(recorded, family, ": gradient of ")
        if "/eval/" in name and "/no-labels" in name and "/detached/" in name
    ]
    different = _different(recorded, names)
    assert different
    assert [name for name in different if " of mtp." not in name] == []
    assert not any(name in recorded["patched"]["values"] for name in different)


@pytest.mark.parametrize("family", FAMILIES)
def test_logged_losses_and_acceptance_counts_are_upstreams_bit_for_bit(recorded, family):
    names = _names(recorded, family, ": tracker ")
    counts = {"correct_values", "total_values"} if counts_acceptance() else set()
    assert {name.split()[-1] for name in names} == {loss_key(), *counts}
    assert any(recorded["patched"]["values"][name].any() for name in names)
    assert _different(recorded, names) == []


def _names(recorded: dict[str, dict], family: str, kind: str) -> list[str]:
    """Names of one kind of value that either tree has."""
    known = recorded["patched"]["values"].keys() | recorded["unpatched"]["values"].keys()
    return sorted(name for name in known if name.startswith(f"{family}/") and kind in name)


def _different(recorded: dict[str, dict], names: list[str]) -> list[str]:
    """The names that one tree lacks, or whose values are not the same bits."""
    ours, theirs = recorded["patched"]["values"], recorded["unpatched"]["values"]
    return [
        name
        for name in names
        if not (name in ours and name in theirs and _same(ours[name], theirs[name]))
    ]


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
