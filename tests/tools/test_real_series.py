"""The series of this repository has not drifted, and one changed byte in it would be noticed."""

import shutil
from pathlib import Path

import pytest
from forklib import project, sdist

from tests.tools.conftest import Sandbox

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = "megatron/core/transformer/mtp_objective/layout.py"


@pytest.fixture
def copy(tmp_path, capsys, monkeypatch) -> Sandbox:
    """This repository's pin, patches and added files, to be spoilt."""
    monkeypatch.setenv("MEGATRON_CORE_SDIST", str(sdist.obtain(project.load(ROOT))))
    shutil.copy(ROOT / "fork.toml", tmp_path)
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    for path, source in project.load(ROOT).added_files().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / path)
    return Sandbox(tmp_path, capsys)


def flip(path: Path, index: int) -> None:
    """Changes one byte of a file."""
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


def test_pin_patches_and_added_files_agree(copy):
    copy.ok("check", "--no-tests")


def test_one_byte_in_a_patch_is_caught(copy):
    path = copy.path("patches/0002-shift.patch")
    flip(path, path.read_bytes().index(b"\n+def ") + len(b"\n+def "))
    assert "0002-shift.patch is not what an export writes" in copy.fails("check", "--no-tests")


def test_one_byte_in_a_file_under_megatron_is_caught(copy):
    flip(copy.path(LAYOUT), 10)
    assert f"{LAYOUT} here differs from what its patch adds" in copy.fails("check", "--no-tests")


def test_one_digit_of_the_pinned_hash_is_caught(copy):
    digest = project.load(copy.root).base.sha256
    copy.replace("fork.toml", digest, ("1" if digest[0] == "0" else "0") + digest[1:])
    assert "sdist hash differs" in copy.fails("check", "--no-tests")
