"""C12, C13 and C14 of the known faults: there in the unpatched release, and not here.

    python -m pytest tests/unit_tests/transformer/test_mtp_overlap_faults.py
"""

import json
from pathlib import Path

import pytest

from tests.support import ddp_faults, prepare
from tests.support.unpatched import NoUnpatchedTree, faulty_tree, run_in_tree

prepare()

UPSTREAM = {
    "later stage": "in reset\n    assert len(self.per_param_grad_ready_counts) == len(self.params)",
    "later stage, tied": "assert len(self.per_param_grad_ready_counts) == len(self.params)",
    "later stage, tied, checkpoint": "assert output_layer_weight_key not in sharded_state_dict",
    "heads on, off, on": "Communication call has not been issued for this bucket",
    "heads off, on, on": "assert len(self.per_param_grad_ready_counts) == len(self.params)",
}


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("unpatched")
    try:
        tree = faulty_tree(directory / "tree")
    except NoUnpatchedTree as error:
        pytest.skip(str(error))
    run_in_tree(tree, Path(ddp_faults.__file__), [directory / "outcomes.json"])
    return json.loads((directory / "outcomes.json").read_text())


@pytest.fixture(scope="module")
def here():
    return ddp_faults.outcomes()


@pytest.mark.parametrize("case", ddp_faults.CASES)
def test_the_unpatched_release_fails(unpatched, case):
    assert UPSTREAM[case] in unpatched[case]


@pytest.mark.parametrize("case", ddp_faults.CASES)
def test_here_it_passes(here, case):
    assert here[case] == ddp_faults.PASSES
