"""What an exported directory is for: transformers loads it, vLLM and SGLang find the head in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import prepare

prepare()

from tools.mtp_checkpoint.exporting import export_directory  # noqa: E402
from tools.mtp_checkpoint.source import HFDirectory  # noqa: E402

# What the Qwen3.5 MTP loaders of both servers look for after their own renaming: vLLM's
# vllm/model_executor/models/qwen3_5_mtp.py, SGLang's python/sglang/srt/models/qwen3_5_mtp.py.
COMMON = """
    mtp.fc.weight
    mtp.norm.weight
    mtp.pre_fc_norm_embedding.weight
    mtp.pre_fc_norm_hidden.weight
    mtp.layers.0.input_layernorm.weight
    mtp.layers.0.post_attention_layernorm.weight
    mtp.layers.0.self_attn.q_proj.weight
    mtp.layers.0.self_attn.k_proj.weight
    mtp.layers.0.self_attn.v_proj.weight
    mtp.layers.0.self_attn.o_proj.weight
    mtp.layers.0.self_attn.q_norm.weight
    mtp.layers.0.self_attn.k_norm.weight
""".split()
MIXTURE = """
    mtp.layers.0.mlp.gate.weight
    mtp.layers.0.mlp.shared_expert_gate.weight
    mtp.layers.0.mlp.shared_expert.gate_proj.weight
    mtp.layers.0.mlp.shared_expert.up_proj.weight
    mtp.layers.0.mlp.shared_expert.down_proj.weight
""".split()
EXPERTS = {
    "per-expert": [
        f"mtp.layers.0.mlp.experts.{expert}.{kind}_proj.weight"
        for expert in range(8)
        for kind in ("gate", "up", "down")
    ],
    "packed": ["mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.down_proj"],
}
DENSE = [f"mtp.layers.0.mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")]

LOAD = """
import sys, torch, transformers
def load(path):
    name = transformers.AutoConfig.from_pretrained(path).architectures[0]
    model, report = getattr(transformers, name).from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "for"}]
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
    bad = [report["missing_keys"], report["mismatched_keys"], report["error_msgs"]]
    assert not any(map(len, bad)), bad
    with torch.no_grad():
        return model(input_ids=ids).logits
before, after = map(load, sys.argv[1:])
assert before.isfinite().all() and torch.equal(before, after)
print("equal", tuple(after.shape))
"""


def keys_of_the_head(directory):
    """Keys of an exported directory that begin with ``mtp.``."""
    return {key for key in HFDirectory.open(directory).tensors if key.startswith("mtp.")}


@pytest.mark.parametrize("layout", ["per-expert", "packed"])
@pytest.mark.parametrize("source", ["per-expert", "packed"])
def test_exported_keys_are_those_that_vllm_and_sglang_expect(
    tiny, imported, tmp_path, source, layout
):
    which = "qwen3_5_moe", source
    export_directory(imported(*which), tiny(*which), tmp_path / "out", layout=layout)
    assert keys_of_the_head(tmp_path / "out") == {*COMMON, *MIXTURE, *EXPERTS[layout]}


def test_a_dense_head_has_the_keys_that_vllm_and_sglang_expect(tiny, imported, tmp_path):
    export_directory(imported("qwen3_5"), tiny("qwen3_5"), tmp_path / "out")
    assert keys_of_the_head(tmp_path / "out") == {*COMMON, *DENSE}


def test_transformers_loads_the_exported_directory_and_computes_the_same(
    tiny, imported, tmp_path
):
    out = tmp_path / "out"
    export_directory(imported(), tiny(), out, layout="packed")
    # A process without the stand-in, which spoils the rotary frequencies of such models.
    command = [sys.executable, "-c", LOAD, str(tiny()), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("equal (1, ") and done.stdout.endswith(", 768)\n")
