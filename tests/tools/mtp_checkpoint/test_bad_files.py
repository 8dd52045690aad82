"""Files that are not as they should be: refused from headers alone, never unpickled."""

from __future__ import annotations

import json
import pickle
import struct

import pytest
import torch

from tests.tools.mtp_checkpoint.directories import INDEX, file_of, refusal
from tools.mtp_checkpoint import cli
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.inspecting import inspect_directory
from tools.mtp_checkpoint.source import HFDirectory

NORM = "mtp.norm.weight"
EXPERT = "mtp.layers.0.mlp.experts.3.up_proj.weight"


class Explosive:
    """Unpickling this leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "Pytorch_Model-00001-of-00002.BIN", "part/adapter_model.bin"]
)
def test_pickled_weights_are_refused_and_never_unpickled(damaged, tmp_path, name):
    trace = tmp_path / "unpickled"
    (damaged / name).parent.mkdir(exist_ok=True)
    (damaged / name).write_bytes(pickle.dumps(Explosive(trace)))
    assert f"pickled weights are refused, and were not opened: {name}" in refusal(damaged)
    assert not trace.exists()


def test_pickled_weights_that_an_index_names_are_refused(damaged, tmp_path):
    (damaged / "weights.pt").write_bytes(pickle.dumps(Explosive(tmp_path / "unpickled")))
    index = {"weight_map": {NORM: "weights.pt"}}
    (damaged / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "pickled weights are refused, and were not opened: weights.pt" in refusal(damaged)
    assert not (tmp_path / "unpickled").exists()
    (damaged / "pytorch_model.bin.index.json").write_text("no JSON")
    assert inspect_directory(damaged).problems == ()


TRAINERS = ("optimizer.pt", "rng_state.pth", "scaler.pt", "scheduler.pt", "training_args.bin")


def test_what_a_trainer_leaves_beside_the_weights_is_ignored_and_said_so(
    damaged, tmp_path, capsys
):
    trace = tmp_path / "unpickled"
    for name in TRAINERS:
        (damaged / name).write_bytes(pickle.dumps(Explosive(trace)))
    found = inspect_directory(damaged)
    assert (found.problems, found.ignored) == ((), TRAINERS)
    assert found.to_json()["ignored"] == list(TRAINERS)
    assert cli.main(["inspect", str(damaged)]) == 0
    printed = capsys.readouterr().out
    assert all(f"ignored, and not opened: {name}, a pickle" in printed for name in TRAINERS)
    assert cli.main(["import", str(damaged), "--out", str(tmp_path / "out")]) == 0
    assert not trace.exists()


def test_a_directory_of_pickles_alone_is_refused(damaged):
    for file in damaged.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    (damaged / INDEX).unlink()
    assert "pickled weights are refused" in refusal(damaged)


def test_a_tensor_in_two_shards_is_refused(damaged):
    other = damaged / "model-00001-of-00003.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({**load_file(other), NORM: torch.zeros(64)}, other)
    assert f"{NORM} is in both model-00001-of-00003.safetensors and" in refusal(damaged)


def test_a_stray_file_with_a_stale_copy_is_refused(damaged):
    from safetensors.torch import save_file

    save_file({NORM: torch.zeros(64)}, damaged / "mtp.safetensors")
    assert f"{NORM} is in both" in refusal(damaged)


def test_a_header_that_names_a_tensor_twice_is_refused(damaged):
    file = file_of(damaged, NORM)
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entry = json.loads(raw[8 : 8 + length])[NORM]
    twice = raw[8 : 8 + length].rstrip()[:-1] + b',"%s":%s}' % (
        NORM.encode(),
        json.dumps(entry).encode(),
    )
    twice += b" " * (-len(twice) % 8)
    file.write_bytes(struct.pack("<Q", len(twice)) + twice + raw[8 + length :])
    assert f"the header names {NORM} more than once" in refusal(damaged)


@pytest.mark.parametrize("text", [b"[1, 2]", b"5", b'"text"', b"null"])
def test_a_header_that_is_no_object_is_refused(damaged, text):
    file_of(damaged, NORM).write_bytes(struct.pack("<Q", len(text)) + text)
    assert "not a safetensors file, its header is no JSON object" in refusal(damaged)


@pytest.mark.parametrize(
    "index, message",
    [
        ({"weight_map": ["model.safetensors"]}, "expected a weight_map"),
        ({"weight_map": None}, "expected a weight_map"),
        ({"weight_map": {NORM: ["model.safetensors"]}}, "expected a weight_map"),
        ({"weight_map": {}, "metadata": [1]}, "expected metadata to be"),
    ],
)
def test_an_index_that_is_none_is_refused(damaged, index, message):
    (damaged / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        HFDirectory.open(damaged)


def test_an_index_does_not_lead_out_of_the_directory(damaged, tiny):
    index = json.loads((damaged / INDEX).read_text())
    name = index["weight_map"][NORM]
    index["weight_map"][NORM] = str(tiny() / name)
    (damaged / INDEX).write_text(json.dumps(index))
    assert f"{tiny() / name} is in the index but not in the directory" in refusal(damaged)


def test_a_hubs_cache_of_links_is_read_and_a_broken_link_refused(damaged, tmp_path):
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in damaged.iterdir():
        (snapshot / file.name).symlink_to(f"../../damaged/{file.name}")
    assert inspect_directory(snapshot).problems == ()
    (damaged / "tokenizer.json").unlink()  # an export would silently lack it
    assert "broken links: tokenizer.json (1 in all)" in refusal(snapshot)
    shard = file_of(damaged, NORM)
    shard.unlink()
    said = refusal(snapshot)
    assert f"{shard.name} is in the index but not in the directory" in said
    assert f"{shard.name}, tokenizer.json (2 in all)" in said


def test_an_index_that_disagrees_with_the_headers_is_refused(damaged):
    index = json.loads((damaged / INDEX).read_text())
    index["weight_map"][NORM] = "model-00001-of-00003.safetensors"
    del index["weight_map"][EXPERT]
    (damaged / INDEX).write_text(json.dumps(index))
    said = refusal(damaged)
    assert f"{NORM} is in the index, for model-00001-of-00003.safetensors, but not in" in said
    assert f"{EXPERT} is in {file_of(damaged, 'mtp.fc.weight').name[:6]}" in said


def test_a_missing_shard_is_named(damaged):
    file_of(damaged, NORM).unlink()
    assert "is in the index but not in the directory" in refusal(damaged)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard_is_refused(damaged, keep):
    file = file_of(damaged, NORM)
    file.write_bytes(file.read_bytes()[:keep])
    said = refusal(damaged)
    assert file.name in said and ("truncated" in said or "not a whole" in said)


def test_what_is_no_checkpoint_directory_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has no config.json"):
        HFDirectory.open(tmp_path)
    with pytest.raises(CheckpointError, match="expected the directory"):
        HFDirectory.open(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        HFDirectory.open(tmp_path)
