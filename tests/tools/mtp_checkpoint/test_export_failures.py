"""Exports that cannot be: nothing half-written is left, and no source is touched."""

from __future__ import annotations

import pytest
import torch

from tests.support import prepare
from tests.tools.mtp_checkpoint.directories import copy_of, set_config, set_tensor, tensors

prepare()

from tools.mtp_checkpoint import exporting, launch, rereading  # noqa: E402
from tools.mtp_checkpoint.checkpoint import load_head, read_manifest, save_head  # noqa: E402
from tools.mtp_checkpoint.errors import CheckpointError  # noqa: E402
from tools.mtp_checkpoint.exporting import export_directory  # noqa: E402

NORM = "mtp.norm.weight"


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


def test_the_source_and_the_checkpoint_are_only_read(untouched, tmp_path):
    checkpoint, like, _ = untouched
    export_directory(checkpoint, like, tmp_path / "elsewhere", layout="packed")
