"""docs/support-matrix.md says what the tests' own parameters say.

Run: pytest tests/docs/test_support_matrix.py
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.claims import supports

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "support_matrix.py"


def _tool():
    spec = importlib.util.spec_from_file_location("support_matrix", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_matrix_is_the_one_the_tests_give():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, env=environment
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]


def test_parameters_combined_in_every_way_share_a_row_and_others_do_not():
    combinations = _tool().combinations
    every = [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]
    assert combinations("test_x", every) == ["a / b × c / d"]
    assert combinations("test_x", every[:3]) == ["a, c", "a, d", "b, c"]
    assert combinations("test_x", [("a",), ("b",)]) == ["a", "b"]
    assert combinations("test_two_words", [()]) == ["two words"]


def test_a_claim_has_one_result():
    assert supports("axis", agrees=1e-12, ranks=2)(lambda: None).supports.result == (
        "agrees with one rank, ≤ 1e-12"
    )
    for wrong in ({}, dict(agrees=1e-12, refused="no")):
        with pytest.raises(ValueError, match="exactly one"):
            supports("axis", **wrong)
