"""The verb: checkpoints of any expert-parallel size and dtype, texts, exit codes, files."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support import prepare
from tests.tools.mtp_checkpoint.native_support import Kind, directory
from tools.mtp_checkpoint import verifying
from tools.mtp_checkpoint.checkpoint import DTYPES
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.importing import import_directory

prepare()

KIND = Kind("qwen3_5_moe", "packed", "fp32")


def _options(source, checkpoint, *words):
    parser = argparse.ArgumentParser()
    verifying.add_arguments(parser)
    options = parser.parse_args([str(word) for word in words])
    options.directory, options.checkpoint = Path(source), Path(checkpoint)
    return options


@pytest.mark.parametrize("ranks, dtype", [(1, "fp32"), (2, "fp32"), (4, "bf16")])
def test_checkpoints_of_every_expert_parallel_size_and_dtype_pass(
    ranks, dtype, tmp_path, capsys
):
    """A float32 source stored in bfloat16 is compared with the source rounded the same way."""
    source = directory(KIND).path
    import_directory(source, tmp_path / "ckpt", ranks=ranks, dtype=DTYPES[dtype])
    options = _options(source, tmp_path / "ckpt", "--json", tmp_path / "report.json")
    assert verifying.run(options) == 0
    printed = capsys.readouterr().out
    assert "496 rows: Qwen3_5MoeForCausalLM on Python's manual" in printed
    assert "computes what the checkpoint's head computes" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] and report["rows"] == 496
    assert len(report["per_row"]["delta"]) == 496
    assert max(report["per_row"]["delta"]) <= 1e-5


def test_another_checkpoints_head_fails_with_exit_code_one(tmp_path, capsys):
    """One of eight experts has its gate rows negated."""
    source = directory(KIND).path
    shutil.copytree(source, tmp_path / "other")
    shard = tmp_path / "other" / "model-00003-of-00003.safetensors"
    tensors = load_file(shard)
    key = "mtp.layers.0.mlp.experts.gate_up_proj"
    tensors[key][5, :48] *= -1
    save_file(tensors, shard, metadata={"format": "pt"})
    import_directory(tmp_path / "other", tmp_path / "ckpt")
    options = _options(source, tmp_path / "ckpt", "--rows-from", "random")
    assert verifying.run(options) == 1
    assert "Not the same head" in capsys.readouterr().out


def test_the_head_of_another_model_is_refused(tmp_path):
    import_directory(directory(KIND).path, tmp_path / "ckpt")
    dense = directory(Kind("qwen3_5", "dense", "fp32")).path
    with pytest.raises(CheckpointError, match="is of family qwen3_5_moe, .* of qwen3_5"):
        verifying.run(_options(dense, tmp_path / "ckpt"))
    manifest = tmp_path / "ckpt" / "mtp_head.json"
    manifest.write_text(manifest.read_text().replace('"hidden_size": 64', '"hidden_size": 32'))
    with pytest.raises(CheckpointError, match="the head has hidden_size 32, .* has 64"):
        verifying.run(_options(directory(KIND).path, tmp_path / "ckpt"))


def test_a_text_of_ones_own_is_used_and_a_short_one_refused(tmp_path):
    source = directory(KIND).path
    import_directory(source, tmp_path / "ckpt")
    text = tmp_path / "text.txt"
    text.write_text("Speculative decoding drafts tokens and verifies them. " * 40)
    few = ("--text", text, "--sequences", 2, "--length", 32)
    assert verifying.run(_options(source, tmp_path / "ckpt", *few)) == 0
    text.write_text("Too short.")
    with pytest.raises(CheckpointError, match="at least 2 rows of 32.*fewer --sequences"):
        verifying.run(_options(source, tmp_path / "ckpt", *few))
    with pytest.raises(CheckpointError, match="at least 1 × 3"):
        verifying.run(_options(source, tmp_path / "ckpt", "--length", 2))


@pytest.mark.parametrize("family, layout", [("mimo", "dense"), ("deepseek_v3", "per-expert")])
def test_a_head_without_a_whole_target_is_verified_on_random_rows(family, layout, tmp_path):
    source = directory(Kind(family, layout, "fp32")).path
    import_directory(source, tmp_path / "ckpt", dtype=DTYPES["bf16"])
    with pytest.raises(CheckpointError, match="--rows-from random"):
        verifying.run(_options(source, tmp_path / "ckpt"))
    assert verifying.run(_options(source, tmp_path / "ckpt", "--rows-from", "random")) == 0
