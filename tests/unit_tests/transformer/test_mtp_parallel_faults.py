"""Padding masks, dynamic groups, recomputed biases: wrong in the unpatched release, not here.

    python -m pytest tests/unit_tests/transformer/test_mtp_parallel_faults.py
"""

import json
from pathlib import Path

import pytest

from tests.support import parallel_faults, prepare
from tests.support.parallel_faults import PASSES
from tests.support.release import release
from tests.support.unpatched import NoUnpatchedTree, faulty_tree, run_in_tree

prepare()


def test_the_unpatched_release_fails(tmp_path):
    try:
        tree = faulty_tree(tmp_path / "tree")
    except NoUnpatchedTree as error:
        pytest.skip(str(error))
    run_in_tree(tree, Path(parallel_faults.__file__), [tmp_path / "outcomes.json"])
    found = json.loads((tmp_path / "outcomes.json").read_text())
    assert found["shifted parts"] > 0.1
    assert found["hybrid heads"] == 0.0
    assert "size of tensor a (8) must match the size of tensor b (16)" in found["hybrid parts"]
    assert "split_with_sizes expects split_sizes to sum exactly to 6" in found["dynamic group"]
    assert found["handed bias"] is False


def test_here_it_passes():
    found = parallel_faults.outcomes()
    assert found["shifted parts"] <= 1e-12
    if release() >= (0, 18):  # before, heads get no mask
        assert found["hybrid heads"] > 0.1
    assert found["hybrid parts"] == found["dynamic group"] == PASSES
    assert found["handed bias"] is True
