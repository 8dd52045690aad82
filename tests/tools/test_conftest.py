"""A test run that imports Megatron from anywhere but the tree fails as a whole."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


def run(root: Path, elsewhere: Path) -> subprocess.CompletedProcess:
    """Runs a test that imports megatron.core, under our conftest."""
    (root / "tests").mkdir()
    shutil.copy(CONFTEST, root / "tests" / "conftest.py")
    test = "def test_it():\n    import megatron.core\n"
    (root / "tests" / "test_it.py").write_text(test)
    env = os.environ | {"MEGATRON_TREE": str(root / "tree"), "PYTHONPATH": str(elsewhere)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


def make_megatron(folder: Path) -> Path:
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "__init__.py").write_text("")
    return folder


def test_megatron_from_the_tree_is_fine_even_if_another_is_on_the_path(tmp_path):
    make_megatron(tmp_path / "tree")
    done = run(tmp_path, make_megatron(tmp_path / "elsewhere"))
    assert done.returncode == 0, done.stdout


def test_megatron_from_elsewhere_ends_the_run_naming_both_places(tmp_path):
    done = run(tmp_path, make_megatron(tmp_path / "elsewhere"))
    said = done.stdout + done.stderr
    assert done.returncode == 4
    assert f"expected megatron.core from {tmp_path / 'tree'}" in said
    assert str(tmp_path / "elsewhere") in said


def test_tests_that_a_port_does_not_have_are_left_out(tmp_path):
    tree = make_megatron(tmp_path / "build" / "ports" / "0.1" / "tree")
    for folder, name in ((tree, "test_kept.py"), (tmp_path, "test_kept.py"), (tmp_path, "test_x.py")):
        path = folder / "tests" / "unit_tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def test_it():\n    pass\n")
    shutil.copy(CONFTEST, tmp_path / "tests" / "conftest.py")
    env = os.environ | {"MEGATRON_TREE": str(tree)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit_tests"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
