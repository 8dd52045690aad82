"""Git, run so that nobody's configuration changes what it does."""

import hashlib
import os
import subprocess
from pathlib import Path

from forklib.errors import ForkError

# Commits made by the tooling itself; only tree ids matter, so the identity is arbitrary but fixed.
IDENTITY = {
    "GIT_AUTHOR_NAME": "Megatron MTP series",
    "GIT_AUTHOR_EMAIL": "mtp-series@localhost",
    "GIT_COMMITTER_NAME": "Megatron MTP series",
    "GIT_COMMITTER_EMAIL": "mtp-series@localhost",
}
FIXED_DATE = {
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00+0000",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00+0000",
}
_SETTINGS = {
    "safe.directory": "*",
    "core.autocrlf": "false",
    "core.quotePath": "false",
    "core.hooksPath": os.devnull,
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "core.fsync": "none",  # what is made here can be made again
    "init.defaultBranch": "series",
    "advice.detachedHead": "false",
}
_LOCATIONS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")


def clean_environment(isolated: bool = True) -> dict[str, str]:
    """The environment without the variables that point at an outer repository.

    Args:
        isolated: also without any other GIT_* variable and the user's and machine's settings.
    """
    hidden = tuple(key for key in os.environ if key.startswith("GIT_")) if isolated else _LOCATIONS
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    env["LC_ALL"] = "C"
    if isolated:
        env["GIT_CONFIG_NOSYSTEM"] = "1"
        env["GIT_CONFIG_GLOBAL"] = os.devnull
        env["GIT_EDITOR"] = "true"
    return env


class Repo:
    """A git repository with a work tree.

    Args:
        path: the work tree.
        isolated: ignore the user's git configuration (for repositories this tooling owns).
    """

    def __init__(self, path: Path, isolated: bool = True) -> None:
        self.path = path
        self.isolated = isolated

    def run(
        self, *args: str, env: dict[str, str] | None = None, stdin: str | None = None
    ) -> subprocess.CompletedProcess:
        """Runs git and returns the finished process, whatever its exit status."""
        settings = [f"{key}={value}" for key, value in _SETTINGS.items()] if self.isolated else []
        options = [word for setting in settings for word in ("-c", setting)]
        try:
            return subprocess.run(
                ["git", *options, *args],
                cwd=self.path,
                env=clean_environment(self.isolated) | (env or {}),
                input=stdin,
                capture_output=True,
                encoding="utf-8",
                errors="surrogateescape",
            )
        except FileNotFoundError as error:
            raise ForkError(f"cannot run git in {self.path}: {error}. Install git.") from error

    def __call__(
        self, *args: str, env: dict[str, str] | None = None, stdin: str | None = None
    ) -> str:
        """Runs git and returns its output; a failure is a ForkError with git's own words."""
        done = self.run(*args, env=env, stdin=stdin)
        if done.returncode:
            said = (done.stderr + done.stdout).strip()
            raise ForkError(f"`git {' '.join(args)}` failed in {self.path}:\n{said}")
        return done.stdout

    def line(self, *args: str, env: dict[str, str] | None = None) -> str:
        """Runs git and returns its output without the final newline."""
        return self(*args, env=env).rstrip("\n")

    def resolve(self, revision: str) -> str | None:
        """The commit a revision names, or None."""
        done = self.run("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        return done.stdout.strip() or None

    def tree_of(self, revision: str) -> str:
        """The id of a commit's tree."""
        return self.line("rev-parse", f"{revision}^{{tree}}")

    def files_of(self, revision: str) -> dict[str, tuple[str, str]]:
        """Every file of a commit: path to (mode, blob id)."""
        files = {}
        for entry in self("ls-tree", "-r", "-z", "--full-tree", revision).split("\0"):
            if entry:
                meta, path = entry.split("\t", 1)
                mode, _, blob = meta.split()
                files[path] = (mode, blob)
        return files

    def commits(self, base: str, head: str) -> list[str]:
        """The commits after base up to head, oldest first; a merge among them is an error."""
        lines = self("rev-list", "--reverse", "--parents", f"{base}..{head}").split("\n")
        rows = [line.split() for line in lines if line]
        merges = [row[0] for row in rows if len(row) > 2]
        if merges:
            raise ForkError(
                f"expected one plain commit per patch in {self.path}, but {merges[0][:12]} is a"
                " merge. Rebase it away."
            )
        return [row[0] for row in rows]

    def git_path(self, name: str) -> Path:
        """Where git keeps a file of its own for this work tree."""
        return self.path / self.line("rev-parse", "--git-path", name)

    def busy(self) -> str | None:
        """What git operation waits to be continued here, or None."""
        if self.git_path("rebase-apply/applying").exists():
            return "am"
        for name, what in (
            ("rebase-merge", "rebase"),
            ("rebase-apply", "rebase"),
            ("MERGE_HEAD", "merge"),
            ("CHERRY_PICK_HEAD", "cherry-pick"),
            ("sequencer", "cherry-pick"),  # of several, when one was committed by hand
            ("REVERT_HEAD", "revert"),
        ):
            if self.git_path(name).exists():
                return what
        return None


def blob_id(content: bytes) -> str:
    """The id git gives to a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
