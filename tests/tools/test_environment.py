"""An interpreter that cannot run Megatron is named, with what to do about it."""

import importlib.machinery
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forklib import cli, environment

ROOT = Path(__file__).resolve().parents[2]


def stand_in(folder: Path, name: str, script: str) -> Path:
    """An executable that pretends to be an interpreter."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def find_python(path: Path, **env: str) -> subprocess.CompletedProcess:
    """Runs tools/find_python.sh with only `path` and the system's tools on PATH."""
    base = {"PATH": f"{path}:{path / 'tools'}", "HOME": str(path)}
    for tool in ("bash", "head", "sh"):
        link = path / "tools" / tool
        if not link.exists():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(next(p for d in ("/bin", "/usr/bin") if (p := Path(d, tool)).exists()))
    command = [str(path / "tools" / "bash"), str(ROOT / "tools" / "find_python.sh")]
    return subprocess.run(command, env=base | env, capture_output=True, text=True)


@pytest.mark.parametrize("version", [(3, 11, 9), (3, 8, 0), (2, 7, 18)])
def test_python_below_3_12_is_refused_naming_both_versions(version):
    said = environment.python_problem(version, "python3")
    assert "needs Python >= 3.12" in said
    assert f"python3 is Python {version[0]}.{version[1]}" in said
    assert "make PYTHON=" in said


@pytest.mark.parametrize("version", [(3, 12, 0), (3, 13, 1), (4, 0, 0)])
def test_python_3_12_and_later_are_fine(version):
    assert environment.python_problem(version) is None


def test_the_module_that_refuses_an_old_python_can_be_read_by_it():
    import ast

    for name in ("fork.py", "doctor.py", "forklib/environment.py", "forklib/__init__.py"):
        ast.parse((ROOT / "tools" / name).read_text(), feature_version=(3, 4))


def test_an_old_python_stops_the_tooling_before_anything_else():
    script = (
        "import runpy, sys; sys.version_info = (3, 11, 7, 'final', 0); sys.argv = ['x', 'tree'];"
        f"runpy.run_path({str(ROOT / 'tools' / 'fork.py')!r}, run_name='__main__')"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Megatron-Core needs Python >= 3.12")


def test_a_shim_that_fails_is_passed_over(tmp_path):
    stand_in(tmp_path, "python3.12", "echo 'python3.12: command not found' >&2; exit 127")
    stand_in(tmp_path, "python3", f'exec {sys.executable} "$@"')
    done = find_python(tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()


def test_pyenvs_own_versions_are_found_without_being_on_path(tmp_path):
    folder = tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin"
    folder.mkdir(parents=True)
    stand_in(folder, "python", f'exec {sys.executable} "$@"')
    assert find_python(tmp_path).returncode == 0


def test_no_usable_python_lists_what_was_tried(tmp_path):
    old = 'case "$1" in --version) echo Python 3.11.7;; *) exit 3;; esac'
    stand_in(tmp_path, "python3", old)
    done = find_python(tmp_path)
    assert done.returncode == 1
    assert "needs Python >= 3.12" in done.stderr
    assert "python3: Python 3.11.7" in done.stderr
    assert "make PYTHON=/path/to/python3.12" in done.stderr


def test_a_named_python_is_the_only_one_tried(tmp_path):
    stand_in(tmp_path, "python3", f'exec {sys.executable} "$@"')
    named = stand_in(tmp_path, "mine", "echo Python 3.9.1; exit 1")
    done = find_python(tmp_path, PYTHON=str(named))
    assert done.returncode == 1
    assert f"{named}: Python 3.9.1" in done.stderr


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock: setups do not wait")
def test_two_setups_at_once_install_once(tmp_path):
    # Stands for a .venv whose pip takes a second, and notes when it starts.
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    pip = f'if [ "$1" = -m ]; then echo started >> {tmp_path}/log; sleep 1; fi'
    stand_in(folder, "python", pip)
    (tmp_path / "requirements.txt").write_text("anything\n")
    command = ["bash", str(ROOT / "tools" / "setup_env.sh"), "venv", "requirements.txt"]
    env = os.environ | {"PYTHON": sys.executable}
    both = [
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = "".join(setup.communicate(timeout=120)[0] for setup in both)
    assert [setup.returncode for setup in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "started\n"
    assert said.count("torch is large") == 1 and said.count("waiting for it") <= 1


def spec_of(folder: Path) -> importlib.machinery.ModuleSpec:
    """How an installed package `apex` in this folder looks to the import system."""
    spec = importlib.machinery.ModuleSpec("apex", None, origin=str(folder / "__init__.py"))
    spec.submodule_search_locations = [str(folder)]
    return spec


def test_the_unrelated_apex_is_refused_with_the_way_to_remove_it(tmp_path):
    said = environment.apex_problem(lambda _: spec_of(tmp_path), lambda _: "0.9.10.dev0")
    assert "apex 0.9.10.dev0 is installed" in said
    assert "no apex.normalization" in said
    assert "pip uninstall apex" in said


def test_an_unrelated_apex_without_metadata_is_named_by_its_file(tmp_path):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    said = environment.apex_problem(lambda _: spec_of(tmp_path), unknown)
    assert str(tmp_path / "__init__.py") in said


def test_nvidias_apex_is_fine(tmp_path):
    (tmp_path / "normalization").mkdir()
    assert environment.apex_problem(lambda _: spec_of(tmp_path), lambda _: "0.1") is None


def test_no_apex_is_fine():
    assert environment.apex_problem(lambda _: None) is None


def test_an_apex_on_the_path_of_a_real_interpreter_stops_the_setup(tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "tools" / "doctor.py"), "--quick"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip uninstall apex" in done.stderr


def test_help_names_every_verb(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for verb in ("tree", "patches", "check", "rebase", "apply"):
        assert f"    {verb} " in said


def test_make_help_gives_each_target_one_line():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    for target in ("doctor", "demo", "test", "test-dist", "tree", "patches", "check", "rebase", "bench"):
        assert len(lines[target]) > len(target) + 15
