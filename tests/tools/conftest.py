"""A fork in miniature: a made-up release of a few files, two patches, all in a temporary folder.

Nothing here imports torch or megatron.
"""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from forklib import cli, project  # noqa: E402
from forklib.git import IDENTITY, Repo  # noqa: E402

MODEL = "megatron/core/model.py"
EXTRA = "megatron/core/extra/__init__.py"
TEST = "tests/unit_tests/test_extra.py"
OLD = "0.18.9"
PIN, PATCHES, TREE = f"ports/{OLD}/port.toml", f"ports/{OLD}/patches", f"build/ports/{OLD}/tree"
RELEASE_FILES = {
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": 'MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ""\n',
    MODEL: "".join(f"LINE_{n} = {n}\n" for n in range(1, 41)),
    "README.md": "the release\n",
}
FORK_TOML = """\
[base]
version = "0.19.2"
sdist = "megatron_core-0.19.2.tar.gz"
sha256 = "{sha256}"
upstream_tag = "core_v0.19.2"

[series]
number = 1
tree = ""

[[patch]]
slug = "first"
adds = ["megatron/core/extra/**", "tests/unit_tests/**"]

[[patch]]
slug = "second"
adds = []
"""
MESSAGE = """\
mtp: {what}

Why {what} exists.

Upstream: not sent
Remove-when: upstream has it
Tests: tests/unit_tests/test_extra.py
"""


def make_sdist(path: Path, version: str, files: dict[str, str]) -> str:
    """Writes a tar.gz like a published sdist and returns its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"megatron_core-{version}/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Sandbox:
    """A miniature fork.

    Args:
        root: the folder with fork.toml.
        capsys: captures what a verb prints.
    """

    root: Path
    capsys: pytest.CaptureFixture | None = None

    @property
    def tree(self) -> Path:
        return self.root / "build" / "tree"

    @property
    def git(self) -> Repo:
        return Repo(self.tree)

    def path(self, name: str) -> Path:
        return self.root / name

    def write(self, name: str, text: str) -> None:
        """Writes a file of the fork's repository."""
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        """Replaces a text that the file must hold."""
        text = self.path(name).read_text()
        assert old in text
        self.path(name).write_text(text.replace(old, new, 1))

    def hook(self, old: str, new: str, message: str | None = None) -> None:
        """Edits the model in build/tree, and commits it if a message is given."""
        self.replace(f"build/tree/{MODEL}", old, new)
        if message:
            self.git("commit", "--quiet", "-am", message, env=IDENTITY)

    def reword(self, message: str) -> None:
        """Gives the last commit of build/tree another message."""
        self.git("commit", "--quiet", "--amend", "-m", message, env=IDENTITY)

    def fork(self, *args: str) -> tuple[int, str]:
        """Runs a verb; returns the exit status and all it said."""
        status = cli.main(["--root", str(self.root), *args])
        if self.capsys is None:
            return status, ""
        said = self.capsys.readouterr()
        return status, said.out + said.err

    def ok(self, *args: str) -> str:
        """Runs a verb that must succeed and returns what it said."""
        status, said = self.fork(*args)
        assert status == 0, said
        return said

    def fails(self, *args: str) -> str:
        """Runs a verb that must fail with status 1 and returns what it said."""
        status, said = self.fork(*args)
        assert status == 1, said
        return said

    def series(self) -> dict[str, bytes]:
        """patches/ as it is."""
        return {path.name: path.read_bytes() for path in project.load(self.root).patch_files()}


def build_sandbox(root: Path) -> Sandbox:
    """Makes the release, hooks it with two commits and exports them."""
    sandbox = Sandbox(root)
    sdist = root / "build" / "sdist" / "megatron_core-0.19.2.tar.gz"
    digest = make_sdist(sdist, "0.19.2", RELEASE_FILES)
    sandbox.write("fork.toml", FORK_TOML.format(sha256=digest))
    sandbox.write(EXTRA, "EXTRA = 1\n")
    sandbox.write(
        TEST, "from megatron.core.extra import EXTRA\n\n\ndef test_it():\n    assert EXTRA\n"
    )
    assert sandbox.fork("tree")[0] == 0
    sandbox.hook("LINE_5 = 5\n", "LINE_5 = 5\nFIRST = True\n", MESSAGE.format(what="first"))
    sandbox.hook("LINE_20 = 20\n", "LINE_20 = 20\nSECOND = True\n", MESSAGE.format(what="second"))
    assert sandbox.fork("patches")[0] == 0
    return sandbox


@pytest.fixture(scope="session")
def sandbox_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished miniature fork, to be copied."""
    return build_sandbox(tmp_path_factory.mktemp("template") / "fork").root


@pytest.fixture
def sandbox(sandbox_template: Path, tmp_path: Path, capsys, monkeypatch) -> Sandbox:
    """A miniature fork of one's own."""
    monkeypatch.delenv("MEGATRON_CORE_SDIST", raising=False)
    shutil.copytree(sandbox_template, tmp_path / "fork", symlinks=True)
    return Sandbox(tmp_path / "fork", capsys)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A user's clean git checkout of the release, with a commit of their own on top."""
    return make_checkout(tmp_path / "checkout", RELEASE_FILES)


def make_checkout(path: Path, files: dict[str, str]) -> Path:
    """Makes a git repository that holds these files."""
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    git = ["git", "-C", str(path), "-c", "user.name=user", "-c", "user.email=user@localhost"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "their checkout"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    return path


def files_of_release(version: str, *edits: tuple[str, str]) -> dict[str, str]:
    """The made-up release under another number, with these texts replaced in the model."""
    model = RELEASE_FILES[MODEL]
    for old, new in edits:
        assert old in model
        model = model.replace(old, new)
    major, minor, patch = version.split(".")
    numbers = f'MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ""\n'
    return RELEASE_FILES | {MODEL: model, "megatron/core/package_info.py": numbers}


@pytest.fixture
def older_release(sandbox):
    """Makes the sdist of an older release."""

    def make(*edits: tuple[str, str], version: str = OLD) -> None:
        path = sandbox.path(f"build/sdist/megatron_core-{version}.tar.gz")
        make_sdist(path, version, files_of_release(version, *edits))

    return make


@pytest.fixture
def port(sandbox, older_release):
    """A finished port to a release whose lines lie elsewhere."""
    older_release(("LINE_1 = 1\n", "OLDER = True\n" * 3 + "LINE_1 = 1\n"))
    sandbox.ok("port", OLD)
    return Repo(sandbox.path(TREE))


def patches_of(sandbox: Sandbox) -> list[str]:
    """Names of the patches of the port."""
    return sorted(path.name for path in sandbox.path(PATCHES).iterdir())
