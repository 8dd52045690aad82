"""`inspect` sees in config.json whatever would stop the layer from being built, and says the same."""

from __future__ import annotations

import json

import pytest

from tests.support import prepare
from tests.tools.mtp_checkpoint.directories import copy_of, set_config, set_tensor, tensors

prepare()

from tools.mtp_checkpoint.errors import CheckpointError  # noqa: E402
from tools.mtp_checkpoint.importing import import_directory  # noqa: E402
from tools.mtp_checkpoint.inspecting import inspect_directory  # noqa: E402
from tools.mtp_checkpoint.native.config import head_config  # noqa: E402

MOE, DENSE, DEEPSEEK, MIMO = "qwen3_5_moe", "qwen3_5", "deepseek_v3", "mimo"
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
NAN = float("nan")
PLAIN = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


def _yarn(**changes):
    fields = YARN | changes
    return {"rope_scaling": {name: v for name, v in fields.items() if v is not None}}


FAULTS = [
    (DEEPSEEK, {"n_group": 3}, "n_routed_experts 8 cannot be divided into n_group 3"),
    (DEEPSEEK, {"n_group": 8}, "n_group 8 leaves 1 expert in a group"),
    (DEEPSEEK, {"topk_group": 3, "num_experts_per_tok": 6}, "topk_group is 3, more than n_group 2"),
    (DEEPSEEK, {"num_experts_per_tok": 4}, "2 · topk_group; got 4 and 1"),
    (DEEPSEEK, {"topk_group": "one"}, "topk_group is 'one', expected a whole number above 0"),
    (DEEPSEEK, {"n_group": None}, "has no n_group"),
    (DEEPSEEK, {"routed_scaling_factor": "2.5"}, "routed_scaling_factor in config.json is '2.5'"),
    (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
    (DEEPSEEK, {"topk_method": "greedy"}, "topk_method is 'greedy', expected 'noaux_tc'"),
    (DEEPSEEK, {"rope_interleave": False}, "rope_interleave is False"),
    (DEEPSEEK, {"q_lora_rank": None}, "q_lora_rank in config.json is None"),
    (DEEPSEEK, _yarn(factor=None), "has no factor, which YaRN depends on"),
    (DEEPSEEK, _yarn(factor=0), "factor in the rotary embedding in config.json is 0"),
    (
        DEEPSEEK,
        _yarn(original_max_position_embeddings=None),
        "has no original_max_position_embeddings, which YaRN depends on",
    ),
    (DEEPSEEK, _yarn(beta_fast="fast"), "beta_fast in the rotary embedding in config.json is"),
    (DEEPSEEK, _yarn(mscale_all_dim="all"), "mscale_all_dim 'all', not a number"),
    (DEEPSEEK, _yarn(attention_factor=1.2), "has an attention_factor"),
    (DEEPSEEK, _yarn(truncate=False), "has truncate False"),
    (DEEPSEEK, {**_yarn(), "rope_theta": None}, "has no rope_theta"),
    (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than num_experts 8"),
    (MOE, {"num_experts_per_tok": 1.5}, "num_experts_per_tok is 1.5, expected a whole number"),
    (MOE, {"rms_norm_eps": "1e-6"}, "rms_norm_eps in config.json is '1e-6'"),
    (MOE, {"rope_parameters": {**PLAIN, "rope_theta": -1}}, "rope_theta is -1, expected a number"),
    (DENSE, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.1}}, "of head_dim 32 are 3"),
    (DENSE, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 2}}, "at most 1"),
    (MOE, {"rope_parameters": {**PLAIN, "rope_theta": NAN}}, "rope_theta is nan, expected a num"),
    (MOE, {"rms_norm_eps": float("inf")}, "rms_norm_eps in config.json is inf"),
    (DENSE, {"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a whole number"),
    (DENSE, {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5, expected a whole number"),
    (MIMO, {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5, expected a whole number"),
    (MIMO, {"rope_theta": 10**400}, "rope_theta in config.json is 1000"),
    (MIMO, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1.0"),
    (MIMO, {"rope_theta": "large"}, "rope_theta in config.json is 'large'"),
]


@pytest.mark.parametrize("family, changes, why", FAULTS, ids=[why for *_, why in FAULTS])
def test_what_stops_the_layer_shows_in_inspect_in_the_same_words(
    tiny, tmp_path, family, changes, why
):
    directory = copy_of(tiny(family), tmp_path / "copy")
    set_config(directory, **changes)
    problems = inspect_directory(directory).problems
    assert any(why in problem for problem in problems), problems
    with pytest.raises(CheckpointError) as of_the_layer:
        head_config(json.loads((directory / "config.json").read_text()))
    assert any(why in problem for problem in of_the_layer.value.problems)
    assert set(of_the_layer.value.problems) <= set(problems)
    with pytest.raises(CheckpointError) as of_import:
        import_directory(directory, tmp_path / "out")
    assert of_import.value.problems == problems


def test_a_whole_yarn_embedding_and_a_flat_outer_model_type_are_no_problem(tiny, tmp_path):
    directory = copy_of(tiny(DEEPSEEK), tmp_path / "yarn")
    set_config(directory, **_yarn(mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1))
    assert inspect_directory(directory).problems == ()
    assert head_config(json.loads((directory / "config.json").read_text()))
    flat = copy_of(tiny(MOE), tmp_path / "flat")
    config = json.loads((flat / "config.json").read_text())
    config = {**config["text_config"], "model_type": MOE}
    (flat / "config.json").write_text(json.dumps(config))
    assert inspect_directory(flat).problems == ()
    assert head_config(config).transformer.num_moe_experts == 8


def test_an_embedding_of_another_shape_shows_in_the_headers(tiny, tmp_path):
    directory = copy_of(tiny(DEEPSEEK), tmp_path / "copy")
    key = "model.layers.2.embed_tokens.weight"
    set_tensor(directory, key, tensors(directory)[key][:-1])
    problems = inspect_directory(directory).problems
    assert [f"{key} is no copy of model.embed_tokens.weight: they differ in shape" in p
            for p in problems] == [True]
