"""Directories that cannot be imported: each is refused with what to change, from headers alone."""

from __future__ import annotations

import json
import pickle
import struct

import pytest
import torch

from tests.tools.mtp_checkpoint.directories import (
    INDEX,
    copy_of,
    file_of,
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


@pytest.fixture
def damaged(tiny, tmp_path):
    """A per-expert checkpoint that the test may damage."""
    return copy_of(tiny(), tmp_path / "damaged")


def refusal(directory) -> str:
    """What inspect finds and open or check refuse: the two must agree."""
    found = inspect_directory(directory).problems
    with pytest.raises(CheckpointError) as refused:
        opened = HFDirectory.open(directory)
        detect(opened).check(opened)
    assert set(refused.value.problems) <= set(found)
    return "\n".join(found)


def test_a_good_directory_has_no_problems(tiny):
    for family in ("qwen3_5_moe", "qwen3_5", "deepseek_v3", "mimo"):
        assert inspect_directory(tiny(family)).problems == ()


class Explosive:
    """Unpickling this leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "original/model.pth"])
def test_pickled_weights_are_refused_and_never_unpickled(damaged, tmp_path, name):
    trace = tmp_path / "unpickled"
    (damaged / name).parent.mkdir(exist_ok=True)
    (damaged / name).write_bytes(pickle.dumps(Explosive(trace)))
    assert f"pickled weights are refused, and were not opened: {name}" in refusal(damaged)
    assert not trace.exists()


def test_a_directory_of_pickles_alone_is_refused(damaged):
    for file in damaged.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    (damaged / INDEX).unlink()
    assert "pickled weights are refused" in refusal(damaged)


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


def test_what_is_no_checkpoint_directory_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has no config.json"):
        HFDirectory.open(tmp_path)
    with pytest.raises(CheckpointError, match="expected the directory"):
        HFDirectory.open(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        HFDirectory.open(tmp_path)


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
