"""The series as commits: applied to a fresh base by git am, written back by git format-patch."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from forklib import sdist
from forklib.errors import ForkError
from forklib.git import FIXED_DATE, IDENTITY, Repo

BRANCH = "series"
BASE_REF = "refs/fork/base"
# Compiled in place or left by interpreters and test runs: ignored in every tree made here.
_EXCLUDES = "*.so\n__pycache__/\n*.pyc\n.pytest_cache/\n.hypothesis/\n"
# Without 3-way and without fuzz; dates of the committer fixed so that commit ids repeat too.
_AM = ("am", "--quiet", "--no-3way", "--committer-date-is-author-date", "--whitespace=nowarn")
_FORMAT = (
    "format-patch",
    "-1",
    "--stdout",
    "--zero-commit",
    "--no-signature",
    "--no-numbered",
    "--full-index",
    "--no-renames",
    "--unified=3",
    "--diff-algorithm=histogram",
)


@dataclass(frozen=True)
class Commit:
    """One commit of a series, as git knows it."""

    id: str
    message: str
    trailers: tuple[tuple[str, str], ...]

    @property
    def subject(self) -> str:
        """First line of the message."""
        return self.message.split("\n", 1)[0]

    @property
    def body(self) -> str:
        """The message without subject and trailers."""
        lines = self.message.split("\n")[1:]
        known = {f"{key}: {value}" for key, value in self.trailers}
        return "\n".join(line for line in lines if line not in known).strip()

    def values(self, key: str) -> list[str]:
        """The values of every trailer with this name, in any case."""
        return [value for name, value in self.trailers if name.lower() == key.lower()]


def make_base(path: Path, archive: Path, version: str) -> str:
    """Makes a repository whose first commit is the sdist as it came.

    Args:
        path: the new work tree; must not exist.
        archive: a verified sdist.
        version: its release, for the message.

    Returns:
        The id of the base commit, also named BASE_REF.
    """
    sdist.unpack(archive, path)
    repo = Repo(path)
    repo("init", "--quiet", "--initial-branch", BRANCH)
    (path / ".git" / "info").mkdir(exist_ok=True)
    (path / ".git" / "info" / "exclude").write_text(_EXCLUDES)
    return commit_all(repo, f"megatron-core {version}, the sdist as published")


def commit_all(repo: Repo, message: str) -> str:
    """Commits the whole work tree as the base and returns its id."""
    repo("add", "--all", "--force")
    repo("commit", "--quiet", "--allow-empty", "-m", message, env=IDENTITY | FIXED_DATE)
    repo("update-ref", BASE_REF, "HEAD")
    return repo.line("rev-parse", "HEAD")


def apply(repo: Repo, base: str, patches: list[Path]) -> str:
    """Applies patch files on top of a commit, in a work tree of its own, and returns the new head.

    Raises:
        ForkError: a patch does not apply; names it and git's reason.
    """
    if not patches:
        return repo.line("rev-parse", base)
    repo("worktree", "prune")
    with tempfile.TemporaryDirectory(prefix="fork-am-") as scratch:
        work = Repo(Path(scratch) / "work")
        repo("worktree", "add", "--quiet", "--detach", str(work.path), base)
        try:
            done = work.run(*_AM, *map(str, patches), env=IDENTITY)
            if done.returncode:
                raise ForkError(describe_am_failure(work, done.stdout + done.stderr, patches))
            return work.line("rev-parse", "HEAD")
        finally:
            repo("worktree", "remove", "--force", str(work.path))


def describe_am_failure(work: Repo, said: str, patches: list[Path]) -> str:
    """Says which patch a stopped git am could not apply, and where."""
    counter = work.git_path("rebase-apply/next")
    number = int(counter.read_text()) if counter.is_file() else 0
    if not 0 < number <= len(patches):
        return f"git am cannot read the series:\n{said.strip()}"
    name = patches[number - 1].name
    failed = re.findall(r"^error: patch failed: (.+):(\d+)$", said, re.MULTILINE)
    lines = [f"{name} does not apply."]
    lines += [f"  {path}: the hunk at line {line} does not match" for path, line in failed]
    for reason in re.findall(r"^error: (.+)$", said, re.MULTILINE):
        if not reason.startswith("patch failed:") and "patch does not apply" not in reason:
            lines.append(f"  {reason}")
    if len(lines) == 1:
        lines.append(said.strip())
    return "\n".join(lines)


def export(repo: Repo, commit: str) -> str:
    """The patch file of a commit; the same commit gives the same bytes everywhere."""
    return repo(*_FORMAT, commit)


def write_patch(path: Path, text: str) -> bool:
    """Writes a patch file if it differs; returns whether it did."""
    data = text.encode("utf-8", "surrogateescape")
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return True


def describe(repo: Repo, commit: str) -> Commit:
    """Reads a commit's message and trailers."""
    message = repo("log", "-1", "--format=%B", commit).rstrip("\n")
    parsed = repo("interpret-trailers", "--parse", stdin=message + "\n")
    pairs = [line.split(": ", 1) for line in parsed.split("\n") if ": " in line]
    return Commit(commit, message, tuple((key, value.strip()) for key, value in pairs))
