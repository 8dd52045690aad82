"""Export: a complete directory, bit for bit what it was where nothing was trained."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from tests.support import prepare
from tests.tools.mtp_checkpoint.directories import (
    INDEX,
    copy_of,
    digests,
    file_of,
    same_bits,
    set_tensor,
    tensors,
)

prepare()

from tools.mtp_checkpoint import launch  # noqa: E402
from tools.mtp_checkpoint.checkpoint import load_head, read_manifest, save_head  # noqa: E402
from tools.mtp_checkpoint.exporting import export_directory  # noqa: E402
from tools.mtp_checkpoint.headers import Header, TensorInfo  # noqa: E402
from tools.mtp_checkpoint.importing import import_directory  # noqa: E402
from tools.mtp_checkpoint.source import HFDirectory  # noqa: E402
from tools.mtp_checkpoint.splice import Output, in_order  # noqa: E402

LAYOUTS = ("per-expert", "packed")
# What is stored, and what it was imported to: none of these loses a bit.
DTYPES = [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stored, held", DTYPES)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_trip_keeps_every_bit(
    tiny, imported, tmp_path, layout, target, stored, held, ranks
):
    like = tiny("qwen3_5_moe", layout, stored)
    checkpoint = imported("qwen3_5_moe", layout, stored, ranks=ranks, to=held)
    out = tmp_path / "out"
    report = export_directory(checkpoint, like, out, layout=target)
    assert Counter(row.status for row in report.rows) == {
        "bit-identical": 41 if target == "per-expert" else 19
    }
    if target == layout:
        assert digests(out) == digests(like)
        return
    # The generator gives both layouts the same head: converting one must make the other.
    found, expected = tensors(out), tensors(tiny("qwen3_5_moe", target, stored))
    for key in (key for key in expected if key.startswith("mtp.")):
        assert same_bits(found[key], expected[key]), key
    for key, tensor in tensors(like).items():
        if not key.startswith("mtp."):
            assert same_bits(found[key], tensor), key
    assert {key for key in found if key.startswith("mtp.")} == {row.key for row in report.rows}


@pytest.mark.parametrize("stored, held", DTYPES)
@pytest.mark.parametrize(
    "family, ranks",
    [("qwen3_5", 1), ("mimo", 1), ("deepseek_v3", 1), ("deepseek_v3", 2), ("deepseek_v3", 4)],
)
def test_the_other_families_come_back_byte_for_byte(
    tiny, imported, tmp_path, family, ranks, stored, held
):
    like = tiny(family, None, stored)
    checkpoint = imported(family, None, stored, ranks=ranks, to=held)
    report = export_directory(checkpoint, like, tmp_path / "out")
    assert report.changed == 0 and len(report.rows) > 10
    assert digests(tmp_path / "out") == digests(like)


def trained(groups, checkpoint, out, names):
    """Write a checkpoint in which the named parameters have moved a little."""
    head = load_head(checkpoint, groups=groups, device="cpu")
    with torch.no_grad():
        for name, parameter in head.mtp.layers[0].named_parameters():
            if name in names:
                parameter.add_(0.125)
    save_head(head, out, read_manifest(checkpoint))


FC1 = "mtp_model_layer.mlp.experts.local_experts.1.linear_fc1.weight"


@pytest.mark.parametrize(
    "layout, changed",
    [
        (
            "per-expert",
            [f"mtp.layers.0.mlp.experts.1.{n}_proj.weight" for n in ("gate", "up")],
        ),
        ("packed", ["mtp.layers.0.mlp.experts.gate_up_proj"]),
    ],
)
def test_what_was_trained_is_changed_and_nothing_else(tiny, imported, tmp_path, layout, changed):
    launch.run(trained, 1, imported(), tmp_path / "ckpt", ["final_layernorm.weight", FC1])
    report = export_directory(tmp_path / "ckpt", tiny(), tmp_path / "out", layout=layout)
    found = [row.key for row in report.rows if row.status == "changed"]
    assert found == [*changed, "mtp.norm.weight"]
    before, after = tensors(tiny()), tensors(tmp_path / "out")
    rounded = (before["mtp.norm.weight"].float() + 0.125).bfloat16()
    assert same_bits(after["mtp.norm.weight"], rounded)
    if layout == "per-expert":
        assert sorted(k for k in before if not same_bits(before[k], after[k])) == sorted(
            [*changed, "mtp.norm.weight"]
        )


def test_only_shards_with_tensors_of_the_head_are_rewritten(tiny, imported, tmp_path):
    like = tiny()
    launch.run(trained, 1, imported(), tmp_path / "ckpt", ["final_layernorm.weight"])
    report = export_directory(tmp_path / "ckpt", like, tmp_path / "out")
    mine = {file_of(like, key).name for key in tensors(like) if key.startswith("mtp.")}
    assert set(report.rewritten) == mine and len(mine) == 2
    before, after = digests(like), digests(tmp_path / "out")
    different = {name for name in before if before[name] != after[name]}
    assert different == {file_of(like, "mtp.norm.weight").name}


def test_the_index_is_rebuilt_with_the_true_size(tiny, imported, tmp_path):
    like = copy_of(tiny(), tmp_path / "like")
    index = json.loads((like / INDEX).read_text())
    index["metadata"] = {"total_size": 1, "note": "kept"}  # such as a careless tool leaves
    (like / INDEX).write_text(json.dumps(index))
    export_directory(imported(), like, tmp_path / "out", layout="packed")
    rebuilt = json.loads((tmp_path / "out" / INDEX).read_text())
    found = tensors(tmp_path / "out")
    assert rebuilt["metadata"] == {
        "total_size": sum(t.nbytes for t in found.values()),
        "note": "kept",
    }
    assert set(rebuilt["weight_map"]) == set(found)
    assert list(rebuilt["weight_map"]) == sorted(found)


def test_no_stale_copy_of_the_head_is_left(tiny, imported, tmp_path):
    export_directory(imported(), tiny(), tmp_path / "out", layout="packed")
    headers = HFDirectory.open(tmp_path / "out").headers.values()
    keys = [info.key for header in headers for info in header.tensors]
    assert len(keys) == len(set(keys))
    assert not [key for key in keys if key.startswith("mtp.") and ".experts.0." in key]


def test_files_are_copies_and_no_links(tiny, imported, tmp_path):
    like = copy_of(tiny(), tmp_path / "like")
    shard = file_of(like, "lm_head.weight")
    shard.rename(tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")  # as in the cache of a hub
    export_directory(imported(), like, tmp_path / "out")
    for file in (tmp_path / "out").iterdir():
        assert not file.is_symlink() and file.stat().st_nlink == 1
    before = digests(like)
    for file in (tmp_path / "out").iterdir():
        file.write_bytes(b"edited later")
    assert digests(like) == before


def test_a_checkpoint_of_one_file_without_an_index_is_exported(tiny, imported, tmp_path):
    from safetensors.torch import save_file

    like = copy_of(tiny(), tmp_path / "like")
    everything = tensors(like)
    for file in [*like.glob("*.safetensors"), like / INDEX]:
        file.unlink()
    save_file(everything, like / "model.safetensors", metadata={"format": "pt"})
    import_directory(like, tmp_path / "ckpt")
    export_directory(tmp_path / "ckpt", like, tmp_path / "same")
    assert digests(tmp_path / "same") == digests(like)
    export_directory(tmp_path / "ckpt", like, tmp_path / "out", layout="packed")
    assert not (tmp_path / "out" / INDEX).exists()
    assert tensors(tmp_path / "out").keys() ^ everything.keys()


def test_a_shard_of_experts_alone_may_go_but_leaves_no_trace(tiny, imported, tmp_path):
    like = copy_of(tiny(), tmp_path / "like")
    first, last = "mtp.layers.0.mlp.experts.0.down_proj.weight", "mtp.norm.weight"
    found = tensors(like)
    # Put one expert's tensor into a shard of its own.
    from safetensors.torch import save_file

    set_tensor(like, first, None)
    save_file({first: found[first]}, like / "model-extra.safetensors")
    index = json.loads((like / INDEX).read_text())
    index["weight_map"][first] = "model-extra.safetensors"
    (like / INDEX).write_text(json.dumps(index))
    export_directory(imported(), like, tmp_path / "out", layout="packed")
    assert not (tmp_path / "out" / "model-extra.safetensors").exists()
    opened = HFDirectory.open(tmp_path / "out")
    assert "model-extra.safetensors" not in opened.index["weight_map"].values()
    assert last in opened.tensors


def test_shards_keep_about_their_sizes_when_the_layout_changes(tiny, imported, tmp_path):
    for source, target in zip(LAYOUTS, reversed(LAYOUTS)):
        like, out = tiny("qwen3_5_moe", source), tmp_path / source
        export_directory(imported("qwen3_5_moe", source), like, out, layout=target)
        largest = max(info.nbytes for info in HFDirectory.open(out).tensors.values())
        for file in like.glob("*.safetensors"):
            assert abs(file.stat().st_size - (out / file.name).stat().st_size) <= largest


def test_a_new_order_puts_wide_dtypes_first_and_an_unchanged_one_stays():
    odd = TensorInfo("odd", (3,), "BF16", "f", 8, 6)
    wide = TensorInfo("wide", (1,), "F32", "f", 14, 4)
    header = Header(None, (odd, wide), b"")
    kept = [Output.kept(odd), Output.kept(wide)]
    assert in_order(kept, header) == kept
    changed = [Output("new", "BF16", (5,), 10), Output.kept(wide)]
    assert [output.key for output in in_order(changed, header)] == ["wide", "new"]


def test_each_tensor_keeps_the_dtype_it_has(tiny, imported, tmp_path):
    like = copy_of(tiny(), tmp_path / "like")
    wide = tensors(like)["mtp.layers.0.mlp.gate.weight"].float()
    set_tensor(like, "mtp.layers.0.mlp.gate.weight", wide)
    import_directory(like, tmp_path / "ckpt")
    for layout in LAYOUTS:
        report = export_directory(tmp_path / "ckpt", like, tmp_path / layout, layout=layout)
        assert report.changed == 0
        assert same_bits(tensors(tmp_path / layout)["mtp.layers.0.mlp.gate.weight"], wide)


def test_an_exported_directory_can_be_exported_into_again(tiny, imported, tmp_path):
    like = tiny()
    export_directory(imported(), like, tmp_path / "packed", layout="packed")
    import_directory(tmp_path / "packed", tmp_path / "ckpt", ranks=2)
    export_directory(tmp_path / "ckpt", tmp_path / "packed", tmp_path / "back", layout="per-expert")
    before, after = tensors(like), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(same_bits(before[key], after[key]) for key in before)
