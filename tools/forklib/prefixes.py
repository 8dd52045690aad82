"""Every prefix of the series must stand alone: its modules import and its own tests pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from forklib import native, series
from forklib.git import Repo
from forklib.report import Report

_IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        sys.exit(f"{name}: {type(error).__name__}: {error}")
"""


def test_paths(commit: series.Commit) -> list[str]:
    """The paths a patch's `Tests:` trailers name, separated by spaces or commas."""
    return [path for value in commit.values("Tests") for path in value.replace(",", " ").split()]


def run(
    repo: Repo, commits: list[str], names: list[str], report: Report, only: str | None = None
) -> None:
    """Checks out each prefix, imports every module the series has touched so far, runs its tests.

    Args:
        repo: a repository with the series.
        commits: one per patch, oldest first.
        names: what to call each.
        report: takes the results.
        only: run the prefix that ends with this one alone, instead of all.
    """
    native.compile_helpers(repo.path)
    touched: set[str] = set()
    for commit, name in zip(commits, names, strict=True):
        changes = repo("diff-tree", "-r", "--no-commit-id", "--name-only", commit).split("\n")
        touched |= {path for path in changes if path.startswith("megatron/")}
        if only not in (None, name):
            continue
        described = series.describe(repo, commit)
        with tempfile.TemporaryDirectory(prefix="fork-prefix-") as scratch:
            work = Path(scratch) / "tree"
            repo("worktree", "add", "--quiet", "--detach", str(work), commit)
            print(f"  …  {name}: importing and testing this prefix", flush=True)
            try:
                _provide_helpers(repo.path, work)
                start = time.monotonic()
                found = _run_prefix(work, modules(work, touched), test_paths(described))
                seconds = time.monotonic() - start
                report.step(f"{name}: prefix imports and passes its tests ({seconds:.0f} s)", found)
            finally:
                repo("worktree", "remove", "--force", str(work))


def _provide_helpers(compiled: Path, work: Path) -> None:
    """Copies the compiled helpers into a prefix, or compiles its own if a patch changed them."""
    source, module = work / native.SOURCE, native.target(compiled)
    if module.is_file() and source.read_bytes() == (compiled / native.SOURCE).read_bytes():
        shutil.copy(module, native.target(work))
    else:
        native.compile_helpers(work)


def modules(tree: Path, paths: set[str]) -> list[str]:
    """Module names of the Python files among paths that exist in the tree."""
    names = set()
    for path in paths:
        if path.endswith(".py") and (tree / path).is_file():
            names.add(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return sorted(names)


def _run_prefix(tree: Path, names: list[str], tests: list[str]) -> list[str]:
    """Imports and tests in fresh processes that see this tree only."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(tree), "MEGATRON_TREE": str(tree), "NO_VCS_VERSION": "1"}
    problems = []
    if names:
        done = _python(tree, env, "-c", _IMPORT, *names)
        if done.returncode:
            problems.append(f"import failed: {_tail(done, 1)}")
    if tests:
        # The sdist's pyproject.toml would configure pytest for upstream's own suites. Its tests/
        # has no __init__.py, that of a Megatron-LM checkout has: name modules alike in both.
        options = ["--disable-warnings", "--import-mode=importlib"]
        options += ["-o", "consider_namespace_packages=true"]
        options += ["-c", os.devnull, "--rootdir", str(tree)]
        done = _python(
            tree, env, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, *tests
        )
        if done.returncode:
            problems.append(f"tests failed (pytest exit {done.returncode}):\n{_tail(done, 40)}")
    return problems


def _python(tree: Path, env: dict[str, str], *args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *args], cwd=tree, env=env, capture_output=True, text=True
    )


def _tail(done: subprocess.CompletedProcess, lines: int) -> str:
    said = (done.stdout.strip() + "\n" + done.stderr.strip()).strip()
    return "\n".join(said.split("\n")[-lines:])
