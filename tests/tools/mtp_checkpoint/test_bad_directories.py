"""Heads that cannot be imported: each is refused with what to change, from headers alone."""

from __future__ import annotations

import json

import pytest
import torch

from tests.tools.mtp_checkpoint.directories import (
    copy_of,
    refusal,
    set_config,
    set_tensor,
    tensors,
)
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import FAMILIES, Family, detect
from tools.mtp_checkpoint.inspecting import inspect_directory
from tools.mtp_checkpoint.rules import Entry
from tools.mtp_checkpoint.source import HFDirectory

NORM = "mtp.norm.weight"
EXPERT = "mtp.layers.0.mlp.experts.3.up_proj.weight"


def test_a_good_directory_has_no_problems(tiny):
    for family in ("qwen3_5_moe", "qwen3_5", "deepseek_v3", "mimo"):
        assert inspect_directory(tiny(family)).problems == ()


def test_a_missing_tensor_is_named(damaged):
    set_tensor(damaged, EXPERT, None)
    assert f"{EXPERT} is missing" in refusal(damaged)


def test_an_extra_tensor_of_the_head_is_named(damaged):
    set_tensor(damaged, "mtp.layers.0.surprise.weight", torch.zeros(3), beside=NORM)
    assert "mtp.layers.0.surprise.weight is of the head but not known" in refusal(damaged)


def test_a_second_layer_of_the_head_is_not_ignored(damaged):
    set_tensor(damaged, "mtp.layers.1.input_layernorm.weight", torch.zeros(64), beside=NORM)
    assert "mtp.layers.1.input_layernorm.weight is of the head" in refusal(damaged)


@pytest.mark.parametrize(
    "family, key",
    [("mimo", "model.mtp_layers.1.x.weight"), ("deepseek_v3", "model.layers.3.x.weight")],
)
def test_a_further_layer_is_seen_from_its_keys_in_the_other_families(tiny, tmp_path, family, key):
    directory = copy_of(tiny(family), tmp_path / "copy")
    set_tensor(directory, key, torch.zeros(4), beside="lm_head.weight")
    assert f"{key} is of a further layer; heads of one layer are supported" in refusal(directory)


def test_a_wrong_shape_is_named_with_the_expected_one(damaged):
    set_tensor(damaged, NORM, torch.zeros(63, dtype=torch.bfloat16))
    assert f"{NORM} has shape (63,), config.json asks for (64,)" in refusal(damaged)


def test_mixed_layouts_are_refused(damaged, tiny):
    packed = tensors(tiny("qwen3_5_moe", "packed"))["mtp.layers.0.mlp.experts.down_proj"]
    set_tensor(damaged, "mtp.layers.0.mlp.experts.down_proj", packed, beside=NORM)
    assert "mixed layouts" in refusal(damaged)


def test_a_quantisation_config_is_refused(damaged):
    set_config(damaged, quantization_config={"quant_method": "fp8"})
    assert "quantised: config.json has a quantization_config (method fp8)" in refusal(damaged)


def test_fp8_scales_are_refused(damaged):
    key = "mtp.fc.weight_scale_inv"
    set_tensor(damaged, key, torch.ones(1, 1), beside=NORM)
    assert f"quantised: it has 1 scales such as {key}" in refusal(damaged)


def test_a_dtype_that_is_no_training_dtype_is_refused(damaged):
    set_tensor(damaged, NORM, torch.zeros(64).to(torch.float8_e4m3fn))
    assert f"{NORM} is F8_E4M3; expected one of F32, BF16, F16" in refusal(damaged)


@pytest.mark.parametrize(
    "field, value, why",
    [
        ("mtp_num_hidden_layers", 2, "heads of one layer"),
        ("mtp_num_hidden_layers", 0, "heads of one layer"),
        ("mtp_use_dedicated_embeddings", True, "shares the target's embedding"),
        ("attention_bias", True, "no biases"),
        ("hidden_act", "gelu", "gated SiLU"),
    ],
)
def test_a_head_of_another_make_is_refused(damaged, field, value, why):
    set_config(damaged, **{field: value})
    said = refusal(damaged)
    assert f"{field} is {value!r}, expected" in said and why in said


@pytest.mark.parametrize(
    "family, field, value, why",
    [
        ("qwen3_5_moe", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "'yarn'"),
        ("qwen3_5_moe", "rope_parameters", {"rope_type": "default"}, "has no rope_theta"),
        ("qwen3_5_moe", "num_experts_per_tok", None, "has no num_experts_per_tok"),
        ("qwen3_5", "rms_norm_eps", None, "has no rms_norm_eps"),
        ("mimo", "use_sliding_window", True, "use_sliding_window is True"),
        ("deepseek_v3", "norm_topk_prob", False, "norm_topk_prob is False"),
        ("deepseek_v3", "rope_scaling", {"type": "linear", "factor": 2}, "'linear'"),
        ("deepseek_v3", "routed_scaling_factor", None, "has no routed_scaling_factor"),
    ],
)
def test_what_the_layer_cannot_compute_shows_without_building_it(
    tiny, tmp_path, family, field, value, why
):
    directory = copy_of(tiny(family), tmp_path / "copy")
    set_config(directory, **{field: value})
    assert why in refusal(directory)


@pytest.mark.parametrize("text_config", [None, "a text"])
def test_a_flat_configuration_is_read(damaged, text_config):
    config = json.loads((damaged / "config.json").read_text())
    flat = {**config["text_config"], "text_config": text_config}
    (damaged / "config.json").write_text(json.dumps(flat))
    assert inspect_directory(damaged).problems == ()
    assert HFDirectory.open(damaged).text_config["model_type"] == "qwen3_5_moe_text"


def test_a_model_type_that_is_no_text_is_refused(damaged):
    config = json.loads((damaged / "config.json").read_text())
    config["model_type"] = config["text_config"]["model_type"] = ["qwen3_5_moe"]
    (damaged / "config.json").write_text(json.dumps(config))
    assert "is not known" in refusal(damaged)


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo"])
def test_more_than_one_layer_is_refused_in_the_other_families(tiny, tmp_path, family):
    directory = copy_of(tiny(family), tmp_path / "copy")
    set_config(directory, num_nextn_predict_layers=2)
    assert "num_nextn_predict_layers is 2, expected 1" in refusal(directory)


def test_all_problems_are_listed_at_once(damaged):
    set_tensor(damaged, EXPERT, None)
    set_config(damaged, attention_bias=True, mtp_num_hidden_layers=2)
    assert len(inspect_directory(damaged).problems) == 3


def test_a_config_without_a_size_is_refused(damaged):
    config = json.loads((damaged / "config.json").read_text())
    del config["text_config"]["head_dim"]
    (damaged / "config.json").write_text(json.dumps(config))
    assert "config.json has no head_dim" in refusal(damaged)


def test_heads_that_do_not_divide_into_groups_are_refused(damaged):
    set_config(damaged, num_key_value_heads=3)
    assert "4 attention heads cannot be divided into 3" in refusal(damaged)


def test_an_unknown_model_is_refused_with_the_known_ones(damaged):
    config = json.loads((damaged / "config.json").read_text())
    config["model_type"] = config["text_config"]["model_type"] = "gpt2"
    (damaged / "config.json").write_text(json.dumps(config))
    assert "model_type 'gpt2' is not known; known are qwen3_5_moe" in refusal(damaged)


def test_an_embedding_of_its_own_is_refused(tiny, tmp_path):
    directory = copy_of(tiny("deepseek_v3"), tmp_path / "copy")
    family = detect(HFDirectory.open(directory))
    family.check_copies(HFDirectory.open(directory))  # as made: copies
    key = "model.layers.2.embed_tokens.weight"
    changed = tensors(directory)[key]
    changed[-1, -1] += 1
    set_tensor(directory, key, changed)
    with pytest.raises(CheckpointError, match=f"{key} is no copy of model.embed_tokens.weight"):
        family.check_copies(HFDirectory.open(directory))


def test_a_new_family_is_one_table(damaged, monkeypatch):
    config = json.loads((damaged / "config.json").read_text())
    config["model_type"] = config["text_config"]["model_type"] = "newcomer"
    (damaged / "config.json").write_text(json.dumps(config))
    table = (Entry("final_layernorm.weight", (("norm.weight", "H"),)),)
    newcomer = Family("newcomer", ("newcomer",), "mtp.", {"H": "hidden_size"}, {"only": table})
    monkeypatch.setattr("tools.mtp_checkpoint.families.FAMILIES", [*FAMILIES, newcomer])
    found = inspect_directory(damaged)
    assert (found.family, found.layout) == ("newcomer", "only")
    (problem,) = found.problems  # everything else that begins with mtp. is not in its table
    assert "and 37 more are of the head but not known" in problem
