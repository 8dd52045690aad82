"""Exports that cannot be: nothing half-written is left, and no source is touched."""

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
import torch

from tests.support import prepare
from tests.tools.mtp_checkpoint.directories import copy_of, digests, set_config, set_tensor

prepare()

from tools.mtp_checkpoint import cli, exporting, launch, rereading, splice, staging  # noqa: E402
from tools.mtp_checkpoint.checkpoint import load_head, read_manifest, save_head  # noqa: E402
from tools.mtp_checkpoint.errors import CheckpointError  # noqa: E402
from tools.mtp_checkpoint.exporting import export_directory  # noqa: E402
from tools.mtp_checkpoint.importing import import_directory  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
NORM = "mtp.norm.weight"


@pytest.fixture
def untouched(tiny, imported, tmp_path):
    """A checkpoint and what to export it into; both must stay as they are, with nothing beside."""
    (tmp_path / "work").mkdir()
    checkpoint, like = imported(), tiny()
    before = digests(checkpoint), digests(like)
    yield checkpoint, like, tmp_path / "work" / "out"
    assert (digests(checkpoint), digests(like)) == before
    assert not any((tmp_path / "work").iterdir())


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


def test_an_output_that_exists_is_left_as_it_is(tiny, imported, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="exists; nothing is overwritten"):
        export_directory(imported(), tiny(), out)
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "precious"]


def test_an_output_that_appears_meanwhile_is_left_as_it_is(tiny, imported, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(exporting, "reread", lambda *_: out.mkdir())
    with pytest.raises(CheckpointError, match="has appeared meanwhile"):
        export_directory(imported(), tiny(), out)
    assert list(out.iterdir()) == [] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("which", ["like", "checkpoint"])
def test_an_output_inside_a_source_is_refused(untouched, which):
    checkpoint, like, _ = untouched
    inside = {"like": like, "checkpoint": checkpoint}[which] / "out"
    with pytest.raises(CheckpointError, match="lies inside"):
        export_directory(checkpoint, like, inside)


def test_the_head_of_another_model_is_refused(untouched, tiny, tmp_path):
    checkpoint, like, out = untouched
    with pytest.raises(CheckpointError, match="the head is of family qwen3_5_moe, .* of qwen3_5"):
        export_directory(checkpoint, tiny("qwen3_5"), out)
    other = copy_of(like, tmp_path / "other")
    set_config(other, moe_intermediate_size=47)
    with pytest.raises(CheckpointError, match="config.json asks for"):
        export_directory(checkpoint, other, out)
    set_config(other, moe_intermediate_size=48)
    smaller = copy_of(checkpoint, tmp_path / "smaller")
    text = (smaller / "mtp_head.json").read_text()
    (smaller / "mtp_head.json").write_text(text.replace('"num_experts": 8', '"num_experts": 4'))
    with pytest.raises(CheckpointError, match="the head has num_experts 4, .* has 8"):
        export_directory(smaller, like, out)


def test_a_layout_that_the_family_does_not_have_is_refused(tiny, imported, tmp_path):
    with pytest.raises(CheckpointError, match="has no layout 'packed'; it has dense"):
        export_directory(imported("qwen3_5"), tiny("qwen3_5"), tmp_path / "out", layout="packed")


def with_value(groups, checkpoint, out, value):
    """Write a checkpoint with one weight of this value."""
    head = load_head(checkpoint, groups=groups, device="cpu")
    with torch.no_grad():
        head.mtp.layers[0].final_layernorm.weight[5] = value
    save_head(head, out, read_manifest(checkpoint))


@pytest.mark.parametrize(
    "value, match",
    [
        (float("nan"), "holds NaN in mtp.layers.0.final_layernorm.weight"),
        (float("inf"), f"{NORM} is not finite in BF16"),
        (torch.finfo(torch.float32).max, f"{NORM} is not finite in BF16"),
    ],
)
def test_a_head_that_has_diverged_is_refused(untouched, tmp_path, value, match):
    checkpoint, like, out = untouched
    launch.run(with_value, 1, checkpoint, tmp_path / "bad", value)
    with pytest.raises(CheckpointError, match=match):
        export_directory(tmp_path / "bad", like, out)


def with_bias_never_loaded(groups, checkpoint, out):
    """Write a checkpoint whose router bias, a buffer, is what building the layer leaves in it."""
    head = load_head(checkpoint, groups=groups, device="cpu")
    head.mtp.layers[0].mtp_model_layer.mlp.router.expert_bias.fill_(float("nan"))
    save_head(head, out, read_manifest(checkpoint))


def test_a_buffer_that_is_not_a_number_is_refused_too(tiny, imported, tmp_path):
    launch.run(with_bias_never_loaded, 1, imported("deepseek_v3"), tmp_path / "bad")
    with pytest.raises(CheckpointError, match="holds NaN in mtp.*expert_bias"):
        export_directory(tmp_path / "bad", tiny("deepseek_v3"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_of_different_dtypes_do_not_become_one(untouched, tmp_path, tiny):
    checkpoint, like, out = untouched
    mixed = copy_of(like, tmp_path / "mixed")
    key = "mtp.layers.0.mlp.experts.3.down_proj.weight"
    from tests.tools.mtp_checkpoint.directories import tensors

    set_tensor(mixed, key, tensors(mixed)[key].float())
    with pytest.raises(CheckpointError, match="would be made of tensors in BF16 and F32"):
        export_directory(checkpoint, mixed, out, layout="packed")


@pytest.mark.parametrize("key", [NORM, "lm_head.weight"])
def test_what_is_written_wrongly_is_noticed_on_reading_it_again(untouched, monkeypatch, key):
    checkpoint, like, out = untouched

    def damaged(directory, original, plan, *rest):
        name = plan.files().get(key) or original.directory.tensors[key].file
        info = rereading.HFDirectory.open(directory).tensors[key]
        with open(directory / name, "r+b") as file:
            file.seek(info.start)
            file.write(b"\x01\x02")
        rereading.reread(directory, original, plan, *rest)

    monkeypatch.setattr(exporting, "reread", damaged)
    with pytest.raises(CheckpointError, match=f"{key} read again differs"):
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


def test_the_source_and_the_checkpoint_are_only_read(untouched, tmp_path):
    checkpoint, like, _ = untouched
    export_directory(checkpoint, like, tmp_path / "elsewhere", layout="packed")
