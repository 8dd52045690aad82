"""The reference is what transformers itself computes, with or without the device stand-in."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from tests.support import prepare
from tests.tools.mtp_checkpoint.directories import copy_of, set_config, set_tensor, tensors
from tests.tools.mtp_checkpoint.native_support import Kind, directory, inputs, reference
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.reference import ReferenceHead
from tools.mtp_checkpoint.source import HFDirectory
from tools.mtp_checkpoint.target_matrices import target_matrices
from tools.mtp_checkpoint.verify_rows import random_rows, target_rows

prepare()

KINDS = (
    Kind("qwen3_5_moe", "per-expert", "fp32"),
    Kind("qwen3_5_moe", "packed", "bf16"),
    Kind("qwen3_5", "dense", "bf16"),
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_agrees_with_transformers_generic_mtp_model(kind):
    """A second opinion on names, halves and norms: code of transformers reads the same files."""
    path = directory(kind).path
    config = transformers.AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    main = transformers.AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32
    )
    generic = MtpModel.from_pretrained(main).eval()
    ids_BS, positions_BS, hidden_BSH = inputs()
    next_ids_BS = torch.nn.functional.pad(ids_BS[:, 1:], (0, 1))
    with torch.no_grad():
        want_BSH = generic.forward_layer(0, hidden_BSH, positions_BS, None, input_ids=next_ids_BS)
        got_BSH, _ = reference(kind)(ids_BS, positions_BS, hidden_BSH)
    assert (got_BSH - want_BSH).abs().max() <= 5e-6


def test_a_target_may_say_in_its_text_config_that_it_is_tied(tiny, tmp_path):
    path = copy_of(tiny("qwen3_5"), tmp_path / "tied")
    set_tensor(path, "lm_head.weight", None)
    with pytest.raises(CheckpointError, match="expected a tensor lm_head.weight"):
        target_matrices(HFDirectory.open(path), torch.float32)
    set_config(path, tie_word_embeddings=True)
    embedding_VH, output_VH = target_matrices(HFDirectory.open(path), torch.float32)
    assert output_VH is embedding_VH


def test_random_rows_need_no_vocab_size_and_stay_within_the_embedding(tiny, tmp_path):
    path = copy_of(tiny("qwen3_5"), tmp_path / "copy")
    set_config(path, vocab_size=None)
    source = HFDirectory.open(path)
    rows = random_rows(source, 4, 16, 0)
    assert rows.token_ids_BS.max() < len(target_matrices(source, torch.float32)[0])
    assert rows.hidden_BSH.shape == (4, 16, 64)
    assert not torch.equal(random_rows(source, 4, 16, 10**30).hidden_BSH, rows.hidden_BSH)


@pytest.mark.parametrize("key", ["model.language_model.embed_tokens.weight", "lm_head.weight"])
def test_target_matrices_of_another_hidden_size_are_refused(tiny, tmp_path, key):
    path = copy_of(tiny("qwen3_5"), tmp_path / "copy")
    set_tensor(path, key, tensors(path)[key][:, :32])
    with pytest.raises(CheckpointError, match=r"has shape \(768, 32\), .* asks for \(768, 64\)"):
        target_matrices(HFDirectory.open(path), torch.float32)


def test_a_target_that_does_not_fit_its_configuration_or_tokenizer_is_refused(tiny, tmp_path):
    path = copy_of(tiny("qwen3_5"), tmp_path / "copy")
    key = "model.language_model.layers.1.self_attn.q_proj.weight"
    whole = tensors(path)
    set_tensor(path, key, whole[key][:3])
    with pytest.raises(CheckpointError, match="transformers cannot load the target"):
        target_rows(HFDirectory.open(path), None, 2, 8)
    key = "model.language_model.embed_tokens.weight"
    set_tensor(path, key, whole[key][:10])
    with pytest.raises(CheckpointError, match="gives token [0-9]+, but the embedding has 10 rows"):
        target_rows(HFDirectory.open(path), None, 2, 8)


def test_rows_and_reference_are_those_of_a_process_without_the_stand_in(tmp_path):
    """Replaced tensor factories once left rotary frequencies uninitialised."""
    path = directory(KINDS[0]).path
    code = f"""
import torch
torch.set_num_threads(1)
from tools.mtp_checkpoint.reference import ReferenceHead
from tools.mtp_checkpoint.source import HFDirectory
from tools.mtp_checkpoint.verify_rows import target_rows
source = HFDirectory.open({str(path)!r})
rows = target_rows(source, None, 2, 32)
out, routing = ReferenceHead.from_directory(source)(
    rows.token_ids_BS, rows.position_ids_BS, rows.hidden_BSH)
figures = [rows.hidden_BSH, rows.pre_norm_BSH, out, routing.gap_BS]
torch.save(figures, {str(tmp_path / "clean.pt")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    clean = torch.load(tmp_path / "clean.pt")
    rows = target_rows(directory(KINDS[0]), None, 2, 32)
    out, routing = reference(KINDS[0])(rows.token_ids_BS, rows.position_ids_BS, rows.hidden_BSH)
    here = (rows.hidden_BSH, rows.pre_norm_BSH, out, routing.gap_BS)
    for got, want in zip(here, clean, strict=True):
        assert torch.equal(got, want)


def test_rows_are_the_final_norms_input_and_output():
    source = directory(KINDS[0])
    rows = target_rows(source, None, 2, 32)
    w_H = source.read("model.language_model.norm.weight")
    x_BSH = rows.pre_norm_BSH
    want_BSH = x_BSH * torch.rsqrt(x_BSH.square().mean(-1, keepdim=True) + 1e-6) * (1 + w_H)
    assert (rows.hidden_BSH - want_BSH).abs().max() <= 1e-6
    assert (rows.hidden_BSH - x_BSH).abs().max() > 0.1


def test_a_target_that_does_not_fit_into_memory_is_not_loaded(monkeypatch):
    import psutil

    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(CheckpointError, match="GB are free.*--rows-from random"):
        target_rows(directory(KINDS[0]), None, 2, 32)


def _damaged(tmp_path, damage):
    """A copy of the per-expert checkpoint with one shard's tensors changed."""
    shutil.copytree(directory(KINDS[0]).path, tmp_path / "copy")
    shard = tmp_path / "copy" / "model-00003-of-00003.safetensors"
    tensors = load_file(shard)
    damage(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    index = tmp_path / "copy" / "model.safetensors.index.json"
    contents = json.loads(index.read_text())
    kept = {k: f for k, f in contents["weight_map"].items() if f != shard.name}
    contents["weight_map"] = kept | dict.fromkeys(tensors, shard.name)
    index.write_text(json.dumps(contents))
    return HFDirectory.open(tmp_path / "copy")


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda t: t.pop("mtp.layers.0.mlp.experts.7.up_proj.weight"), "8 equal experts.*7, 'up'"),
        (lambda t: t.update({"mtp.layers.1.extra": torch.zeros(3)}), "cannot hold.*extra"),
        (
            lambda t: t.update({"mtp.layers.0.mlp.experts.7.up_proj.weight": torch.zeros(48, 8)}),
            "8 equal experts.*size",
        ),
    ],
    ids=["missing", "left over", "of another shape"],
)
def test_a_head_that_is_not_whole_is_refused(tmp_path, damage, message):
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        ReferenceHead.from_directory(_damaged(tmp_path, damage))


def test_a_model_type_without_a_reference_is_named(tmp_path):
    source = directory(KINDS[0])
    other = HFDirectory(source.path, {"model_type": "mamba"}, source.tensors, {}, None)
    with pytest.raises(CheckpointError, match="no reference for model_type 'mamba'"):
        ReferenceHead.from_directory(other)
