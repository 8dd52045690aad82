"""Disks that fill up and processes that are stopped: nothing half-written is left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import prepare

prepare()

from tools.mtp_checkpoint import cli, exporting, splice, staging  # noqa: E402
from tools.mtp_checkpoint.errors import CheckpointError  # noqa: E402
from tools.mtp_checkpoint.exporting import export_directory  # noqa: E402
from tools.mtp_checkpoint.importing import import_directory  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


def full_disk(*_args, **_kwargs):
    """What a full disk says."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FillsUp:
    """A file on a disk that has room for so many bytes more."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def write(self, data):
        """Write, or fail as a full disk does."""
        self._room -= len(data)
        return self._file.write(data) if self._room >= 0 else full_disk()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *exc):
        return self._file.__exit__(*exc)


def test_a_disk_that_fills_up_while_files_are_copied(untouched, monkeypatch, capsys):
    checkpoint, like, out = untouched
    monkeypatch.setattr(exporting.shutil, "copyfile", full_disk)
    arguments = ["export", str(checkpoint), "--like", str(like), "--out", str(out)]
    assert cli.main(arguments) == 2
    assert "error: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("room", [0, 30_000])
def test_a_disk_that_fills_up_within_a_shard(untouched, monkeypatch, room):
    checkpoint, like, out = untouched

    def opened(path, mode):
        file = open(path, mode)
        return FillsUp(file, room) if mode == "wb" else file

    monkeypatch.setattr(splice, "open", opened, raising=False)
    with pytest.raises(OSError, match="No space left"):
        export_directory(checkpoint, like, out)


def test_a_disk_that_is_too_small_is_noticed_first(untouched, monkeypatch):
    checkpoint, like, out = untouched
    small = type("usage", (), {"free": 1000})
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _path: small)
    with pytest.raises(CheckpointError, match="0.00 GB free"):
        export_directory(checkpoint, like, out)
    with pytest.raises(CheckpointError, match="0.00 GB free"):
        import_directory(like, out)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_import_onto_a_disk_that_fills_up(tiny, tmp_path, ranks):
    (tmp_path / "work").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the kernel refuses longer files
    try:
        with pytest.raises(CheckpointError, match="cannot be written, its disk has"):
            import_directory(tiny(), tmp_path / "work" / "out", ranks=ranks)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any((tmp_path / "work").iterdir())


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_export_leaves_nothing(untouched, monkeypatch, stop):
    checkpoint, like, out = untouched

    def interrupted(*_):
        raise stop

    monkeypatch.setattr(exporting, "reread", interrupted)  # everything is written by then
    with pytest.raises(stop):
        export_directory(checkpoint, like, out)


def test_a_process_that_is_terminated_leaves_nothing(tiny, tmp_path):
    """SIGTERM while ranks write: the process that started them cleans up."""
    (tmp_path / "work").mkdir()
    script = (
        "import os, sys, time, tools.mtp_checkpoint.importing as i\n"
        "def slow(*_):\n"
        "    if os.environ['RANK'] == '0':\n"
        "        print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "i.save_head = slow\n"
        "from tools.mtp_checkpoint.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    out = tmp_path / "work" / "out"
    command = [sys.executable, "-c", script, "import", str(tiny()), "--out", str(out)]
    command += ["--expert-parallel-size", "2"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "writing\n"
        assert [".out." in file.name for file in out.parent.iterdir()] == [True]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        process.communicate()
    assert not any(out.parent.iterdir())
