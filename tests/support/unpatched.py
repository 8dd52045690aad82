"""The release the series is based on, without the series, to compare with.

Name a tree of it in MEGATRON_UNPATCHED, or have megatron.core in a git checkout to which the series
was applied with ``git am``: then the commit before the series is unpacked from its history.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Mapping, Sequence

from tests.support.release import release

UNPATCHED_VARIABLE = "MEGATRON_UNPATCHED"
FIRST_FILE = "tests/support/device.py"  # added by the first commit of the series


class NoUnpatchedTree(Exception):
    """There is no unpatched release to compare with; the message says what was tried."""


def patched_tree() -> Path:
    """The tree that megatron.core is imported from in this process."""
    import megatron.core

    return Path(megatron.core.__file__).resolve().parents[2]


def unpatched_tree(directory: Path) -> Path:
    """A tree of the release below the series.

    Args:
        directory: An empty directory to unpack it into, where it does not exist yet.

    Raises:
        NoUnpatchedTree: Neither is MEGATRON_UNPATCHED set nor is the series in the history.
    """
    if UNPATCHED_VARIABLE in os.environ:
        return Path(os.environ[UNPATCHED_VARIABLE]).expanduser().resolve()
    tree = patched_tree()
    if Path(_git(tree, "rev-parse", "--show-toplevel").strip()).resolve() != tree:
        raise NoUnpatchedTree(f"{tree} is no git checkout; set {UNPATCHED_VARIABLE}")
    added = _git(tree, "log", "--diff-filter=A", "--format=%H %P", "--", FIRST_FILE).splitlines()
    commits = added[-1].split() if added else []
    if len(commits) != 2:
        raise NoUnpatchedTree(
            f"the history of {tree} holds no commit that added {FIRST_FILE} to a release; "
            f"set {UNPATCHED_VARIABLE}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / "unpatched.tar"
    _git(tree, "archive", f"--output={archive}", commits[1], "megatron")
    subprocess.run(["tar", "-xf", archive.name], cwd=directory, check=True)
    archive.unlink()
    return directory


def faulty_tree(directory: Path) -> Path:
    """As `unpatched_tree`, for a test that shows what the release of the series gets wrong.

    Raises:
        NoUnpatchedTree: Also on an older release, which fails at other places or in other words.
    """
    if release() < (0, 19):
        raise NoUnpatchedTree("the fault is shown on the release that the series is made for")
    return unpatched_tree(directory)


def import_path(tree: Path) -> str:
    """PYTHONPATH with which megatron comes from ``tree`` and ``tests.support`` from here."""
    return os.pathsep.join([str(tree), str(Path(__file__).resolve().parents[2])])


def run_in_tree(
    tree: Path, script: Path, args: Sequence[Any] = (), env: Mapping[str, str] | None = None
) -> None:
    """Run a script in a process that imports megatron from ``tree``.

    Raises:
        AssertionError: It failed; the message holds the end of what it wrote.
    """
    process = subprocess.run(
        [sys.executable, "-P", str(script), *map(str, args)],
        env={**os.environ, "PYTHONPATH": import_path(tree), **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if process.returncode:
        raise AssertionError(f"{script.name} failed in {tree}:\n{process.stderr[-4000:]}")


def _git(tree: Path, *args: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(tree), *args], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        raise NoUnpatchedTree(f"git {args[0]} in {tree}: {detail}") from error
