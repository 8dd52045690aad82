"""Makes every test import Megatron from one tree, and fails the run if it came from elsewhere.

Imports neither torch nor megatron: the tests of the tooling need neither.
"""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREE = Path(os.environ.get("MEGATRON_TREE") or ROOT / "build" / "tree").expanduser().resolve()


def pytest_configure(config: pytest.Config) -> None:
    """Puts this repository and the tree first on the path, here and in child processes."""
    ours = [str(ROOT), str(TREE)]
    sys.path[:] = ours + [entry for entry in sys.path if entry not in ours]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(ours + [e for e in inherited if e and e not in ours])
    os.environ["NO_VCS_VERSION"] = "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out the tests that a port of the series does not have."""
    if not (collection_path.is_file() and TREE.is_relative_to(ROOT / "build" / "ports")):
        return None
    path = collection_path.relative_to(ROOT)
    of_series = path.parts[1] in ("support", "unit_tests", "functional_tests")
    return True if of_series and not (TREE / path).exists() else None


def _assert_megatron_is_the_tree() -> None:
    core = sys.modules.get("megatron.core")
    if core is not None and not Path(core.__file__).resolve().is_relative_to(TREE):
        pytest.exit(
            f"expected megatron.core from {TREE}, but it came from {core.__file__}."
            " Run the tests with `make test`, or set MEGATRON_TREE to the checkout meant.",
            returncode=4,
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Checks what the test modules imported."""
    _assert_megatron_is_the_tree()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Checks what the test itself imported."""
    _assert_megatron_is_the_tree()
