"""Import: every tensor accounted for at every expert-parallel size, or nothing is written."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.support import parallel_world, prepare, run_ranks
from tests.tools.mtp_checkpoint.directories import copy_of, digests, same_bits, set_tensor, tensors

prepare()

from tools.mtp_checkpoint import importing, launch, mapping  # noqa: E402
from tools.mtp_checkpoint.checkpoint import load_head, read_manifest  # noqa: E402
from tools.mtp_checkpoint.errors import CheckpointError  # noqa: E402
from tools.mtp_checkpoint.families import detect  # noqa: E402
from tools.mtp_checkpoint.importing import import_directory, import_head, merge_rows  # noqa: E402
from tools.mtp_checkpoint.native.layer import build_mtp_block  # noqa: E402
from tools.mtp_checkpoint.source import HFDirectory  # noqa: E402

LAYOUTS = [("per-expert", 41), ("packed", 33)]
NORM = "mtp.norm.weight"
EXPERT = "mtp.layers.0.mlp.experts.7.up_proj.weight"  # on the last rank at every size


def loaded(groups, checkpoint, dtype=None):
    """Tensors of a checkpoint, loaded on one rank."""
    head = load_head(checkpoint, groups=groups, dtype=dtype, device="cpu")
    return {name: tensor.clone() for name, tensor in importing.layer_tensors(head).items()}


@pytest.mark.parametrize("layout, sources", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_tensor_is_accounted_for(imported, tiny, layout, sources, ranks):
    checkpoint = imported("qwen3_5_moe", layout, "bf16", ranks=ranks)
    report = json.loads((checkpoint / "import_report.json").read_text())
    rows = report["rows"]
    assert len(rows) == len({row["source"] for row in rows}) == sources
    head = {k: t for k, t in tensors(tiny("qwen3_5_moe", layout)).items() if k.startswith("mtp.")}
    assert {row["source"].partition("[")[0] for row in rows} == set(head)
    assert sum(row["nbytes"] for row in rows) == sum(t.nbytes for t in head.values())
    assert report["parameters"] == sum(t.numel() for t in head.values()) == 123_328
    assert report["expert_parallel_size"] == ranks == len(report["ranks"])
    # Experts lie on ranks in order, and no rank reads those of another.
    owners = [row["rank"] for row in rows if "local_experts" in row["target"]]
    assert sorted(set(owners)) == list(range(ranks))
    shared = sum(row["nbytes"] for row in rows if "local_experts" not in row["target"])
    experts = report["nbytes"] - shared
    assert [used["bytes_read"] for used in report["ranks"]] == [shared + experts // ranks] * ranks
    assert all(used["peak_rss_bytes"] > 0 for used in report["ranks"])


@pytest.mark.parametrize("layout, sources", LAYOUTS)
def test_any_expert_parallel_size_and_layout_gives_the_same_head(imported, layout, sources):
    expected = launch.run(loaded, 1, imported())[0]
    for ranks in (1, 2, 4):
        found = launch.run(loaded, 1, imported("qwen3_5_moe", layout, "bf16", ranks=ranks))[0]
        assert found.keys() == expected.keys() and len(found) == 30
        assert all(same_bits(found[name], expected[name]) for name in found)


def test_checksums_are_those_of_the_sources_bytes(imported, tiny):
    import hashlib

    rows = json.loads((imported() / "import_report.json").read_text())["rows"]
    head = tensors(tiny())
    for row in rows:
        data = head[row["source"]].contiguous().view(torch.uint8).numpy().tobytes()
        assert row["checksum"] == hashlib.sha256(data).hexdigest()


def test_float32_is_stored_as_it_is_and_bfloat16_is_announced_as_narrower(tiny, tmp_path):
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    source = tiny("qwen3_5_moe", "per-expert", "fp32")
    assert not import_directory(source, wide).narrowed
    assert import_directory(source, narrow, dtype=torch.bfloat16).narrowed
    exact, rounded = launch.run(loaded, 1, wide)[0], launch.run(loaded, 1, narrow)[0]
    assert same_bits(exact["final_layernorm.weight"], tensors(source)[NORM])
    assert read_manifest(narrow)["dtype"] == "bf16"
    assert all(same_bits(exact[name].bfloat16(), rounded[name]) for name in exact)


@pytest.mark.parametrize("family, ranks", [("qwen3_5", 1), ("mimo", 1), ("deepseek_v3", 2)])
def test_the_other_families_import(imported, family, tiny, ranks):
    checkpoint = imported(family, ranks=ranks)
    directory = HFDirectory.open(tiny(family))
    prefix = detect(directory).key_prefix(directory.text_config)
    copies = detect(directory).copied_keys(directory)
    rows = json.loads((checkpoint / "import_report.json").read_text())["rows"]
    assert {row["source"] for row in rows} | copies.keys() == {
        key for key in directory.tensors if key.startswith(prefix)
    }
    assert len(copies) == (2 if family == "deepseek_v3" else 0)
    assert all(t.isfinite().all() for t in launch.run(loaded, 1, checkpoint)[0].values())


def test_a_loaded_head_of_another_dtype_is_the_rounded_one(imported):
    wide = launch.run(loaded, 1, imported())[0]
    narrow = launch.run(loaded, 1, imported(), torch.bfloat16)[0]
    assert all(same_bits(wide[name].bfloat16(), narrow[name]) for name in wide)


def refused(directory, out, match, **options):
    """An import that is refused; it must leave neither output nor traces, and the source alone."""
    before = digests(directory)
    with pytest.raises(CheckpointError, match=match):
        import_directory(directory, out, **options)
    assert digests(directory) == before
    assert not [file.name for file in out.parent.iterdir() if "partial" in file.name]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_that_is_not_finite_is_refused_whichever_rank_reads_it(
    tiny, tmp_path, value, ranks
):
    directory = copy_of(tiny(), tmp_path / "damaged")
    expert = tensors(directory)[EXPERT]
    expert[1, 2] = value
    set_tensor(directory, EXPERT, expert)
    out = tmp_path / "out"
    refused(directory, out, f"{EXPERT} holds 1 values that are not finite", ranks=ranks)
    assert not out.exists()


def test_values_too_large_for_the_dtype_are_refused(tiny, tmp_path):
    directory = copy_of(tiny("qwen3_5_moe", "per-expert", "fp32"), tmp_path / "large")
    large = torch.full((64,), torch.finfo(torch.float32).max)
    set_tensor(directory, NORM, large)
    refused(directory, tmp_path / "out", "values overflow", dtype=torch.bfloat16)


def test_experts_that_do_not_divide_are_refused_before_anything_starts(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("ranks were started"))
    refused(tiny(), tmp_path / "out", "8 experts cannot be divided among 3 ranks", ranks=3)
    refused(tiny(), tmp_path / "out", "expected at least 1", ranks=0)
    refused(tiny("qwen3_5"), tmp_path / "out", "no routed experts", ranks=2)


def test_an_output_that_exists_is_left_as_it_is(tiny, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    refused(tiny(), out, "exists; nothing is overwritten")
    (out / "precious").write_text("x")
    refused(tiny(), out, "exists; nothing is overwritten")
    assert [file.name for file in out.iterdir()] == ["precious"]


def test_an_output_inside_the_source_is_refused(tiny, tmp_path):
    directory = copy_of(tiny(), tmp_path / "source")
    with pytest.raises(CheckpointError, match="lies inside"):
        import_directory(directory, directory / "out")
    with pytest.raises(CheckpointError, match="does not exist; make it first"):
        import_directory(directory, tmp_path / "no" / "out")


def test_the_source_is_only_read(tiny, tmp_path):
    directory = copy_of(tiny(), tmp_path / "source")
    before = digests(directory)
    import_directory(directory, tmp_path / "out", ranks=2)
    assert digests(directory) == before


def head_after(groups_size, path, fault):
    """Import into a layer of one rank, with something wrong; returns what was said."""
    with parallel_world() as groups:
        directory = HFDirectory.open(path)
        head = build_mtp_block(directory.config, groups=groups, device="cpu")
        if fault == "unknown parameter":
            head.mtp.layers[0].register_parameter("w", torch.nn.Parameter(torch.zeros(1)))
        with pytest.raises(CheckpointError) as refused:
            import_head(directory, head, groups)
        return str(refused.value)


def test_a_parameter_that_no_rule_writes_is_refused(tiny):
    said = head_after(1, tiny(), "unknown parameter")
    assert "layer and table do not belong together: w (1 names)" in said


def test_a_parameter_that_is_left_partly_unwritten_is_refused(tiny, monkeypatch):
    views = mapping.Rule.views

    def forgetful(self, index, target, source):
        return views(self, index, target, source)[: 0 if "norm" in self.entry.target else None]

    monkeypatch.setattr(mapping.Rule, "views", forgetful)
    assert "was not written exactly once" in head_after(1, tiny(), "")


def test_rows_of_ranks_that_do_not_fit_together_are_refused(tiny):
    directory = HFDirectory.open(tiny())
    rules = detect(directory).check(directory)
    rows = []
    for rule in rules:
        rows += importing.fill_and_report(rule, directory, torch.empty(rule.target_shape))
    assert merge_rows(rules, [rows]) == tuple(rows)
    with pytest.raises(CheckpointError, match="not used as often .* 0 times, expected 1"):
        merge_rows(rules, [rows[1:]])
    with pytest.raises(CheckpointError, match="2 times, expected 1"):
        merge_rows(rules, [rows, rows])  # two ranks that both hold all experts
    shared = [row for row in rows if "experts.{e}" not in row.target and "local" not in row.target]
    experts = [row for row in rows if row not in shared]
    second = [dataclasses.replace(row, rank=1, checksum="other") for row in shared]
    with pytest.raises(CheckpointError, match="rank 1 read other bytes of"):
        merge_rows(rules, [shared + experts, second])


def import_where_one_rank_fails(path):
    """Rank 1 cannot read; every rank must say so, and none may wait for it."""
    with parallel_world(ep=2) as groups:
        directory = HFDirectory.open(path)
        head = build_mtp_block(directory.config, groups=groups, device="cpu")
        if groups.ep.rank() == 1:
            object.__setattr__(directory, "path", directory.path / "gone")
        with pytest.raises(CheckpointError) as refused:
            import_head(directory, head, groups)
        return str(refused.value)


def test_an_error_on_one_rank_is_every_ranks_error(tiny):
    said = run_ranks(import_where_one_rank_fails, 2, tiny())
    assert said[0] == said[1] and "gone" in said[0]


MANIFEST_FAULTS = (("dtype", "fp8"), ("dtype", None), ("text_config", None), ("family", None))


def test_a_damaged_checkpoint_is_refused_on_loading(imported, tmp_path):
    checkpoint = copy_of(imported(), tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="has no mtp_head.json; expected a directory that"):
        read_manifest(tmp_path)
    contents = json.loads((checkpoint / "mtp_head.json").read_text())
    (checkpoint / "mtp_head.json").write_text(json.dumps({**contents, "format_version": 2}))
    with pytest.raises(CheckpointError, match="is of version 2, this tool reads 1"):
        read_manifest(checkpoint)
    faults = [{**contents, name: value} for name, value in MANIFEST_FAULTS]
    for fault in (*faults, [contents]):
        (checkpoint / "mtp_head.json").write_text(json.dumps(fault))
        with pytest.raises(CheckpointError, match="mtp_head.json: expected a"):
            read_manifest(checkpoint)
    (checkpoint / "mtp_head.json").write_text(json.dumps(contents))
    for file in (checkpoint / "dist").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        launch.run(loaded, 1, checkpoint)
