"""The head of Transformer Engine's modules, grouped GEMM included, against transformers' layers.

On a GPU with Transformer Engine, the thing itself. Without, Megatron's own wrappers, specs and
checkpoints on a stand-in with Transformer Engine's names: the wiring, not the kernels.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import parallel_world, prepare
from tests.support.device import has_transformer_engine
from tests.tools.mtp_checkpoint.bridge_worker import te_name
from tests.tools.mtp_checkpoint.native_support import Kind, directory
from tests.tools.mtp_checkpoint.native_support import imported as imported_head
from tools.mtp_checkpoint import cli
from tools.mtp_checkpoint.checkpoint import manifest, save_head
from tools.mtp_checkpoint.families import detect
from tools.mtp_checkpoint.source import HFDirectory

prepare()

ROOT = Path(__file__).resolve().parents[3]
FUSED = {  # norms that are part of the projection behind them; in front of experts, none is
    "qwen3_5": {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"},
    "deepseek_v3": {
        "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    },
}
FUSED["mimo"] = FUSED["qwen3_5"]


@pytest.mark.skipif(
    not has_transformer_engine(), reason="Transformer Engine is not installed, or there is no GPU"
)
@pytest.mark.parametrize(
    "kind",
    [
        Kind("qwen3_5_moe", "packed", "fp32"),
        Kind("qwen3_5", "dense", "fp32"),
        Kind("mimo", "dense", "fp32"),
    ],
    ids=str,
)
def test_it_loads_the_local_heads_checkpoint_and_computes_the_same(kind, tmp_path, capsys):
    source = directory(kind)
    with parallel_world() as groups:
        contents = manifest(source, kind.family, kind.layout, torch.float32)
        save_head(imported_head(kind, groups), tmp_path / "ckpt", contents)
    arguments = ["verify", str(source.path), str(tmp_path / "ckpt"), "--implementation", "te"]
    assert cli.main([*arguments, "--rows-from", "random"]) == 0, capsys.readouterr().out


@pytest.fixture(scope="module")
def on_the_standin(tmp_path_factory):
    """What the worker found, by family."""
    folder = tmp_path_factory.mktemp("te")
    command = [sys.executable, "-m", "tests.tools.mtp_checkpoint.te_worker", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


needs_no_te = pytest.mark.skipif(
    has_transformer_engine(), reason="the thing itself is there, and no stand-in needed"
)


@needs_no_te
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5", "mimo", "deepseek_v3"])
def test_its_wiring_computes_what_the_checkpoints_head_computes(on_the_standin, family):
    found = on_the_standin[family]
    assert found["passed"] and found["hidden_delta"] <= 1e-5  # the stand-in does not round to TF32
    assert found["argmax_agreement"] == 1.0 and found["flips"] == 0
    assert found["changed on the way back"] == []


@needs_no_te
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5", "mimo", "deepseek_v3"])
def test_its_later_depths_read_what_the_engine_feeds_back(on_the_standin, family):
    found = on_the_standin[family]["later depths"]
    for depth in (2, 3):
        assert found[f"depth {depth}: hidden state, max |Δ|, routers agreeing"] <= 1e-5
        assert found[f"depth {depth}: share of rows with another best token"] == 0


@needs_no_te
def test_it_is_made_of_transformer_engines_modules(on_the_standin):
    moe = set(on_the_standin["qwen3_5_moe"]["modules"])
    assert {"TEGroupedMLP", "TEDotProductAttention", "TELayerNormColumnParallelLinear"} <= moe
    assert not {"SequentialMLP", "SDPACoreAttention", "ZeroCentredRMSNorm"} & moe


@needs_no_te
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5", "mimo", "deepseek_v3"])
def test_every_parameter_of_the_table_has_one_there(on_the_standin, family, tiny):
    layer = "mtp_model_layer."
    fused = {layer + ours: layer + theirs for ours, theirs in FUSED.get(family, {}).items()}
    opened, wanted = HFDirectory.open(tiny(family)), set()
    for name in (rule.target() for rule in detect(opened).check(opened)):
        if family == "deepseek_v3" and name.endswith("input_layernorm.weight"):
            wanted.add(name)  # two projections follow it: a module of its own
        elif not name.endswith("router.expert_bias"):  # a buffer
            wanted.add(fused.get(name, te_name(name)))
    assert sorted(wanted) == on_the_standin[family]["parameters"]


@needs_no_te
@pytest.mark.parametrize("installed", [True, False])
def test_without_it_or_without_a_gpu_verify_refuses(tiny, imported, monkeypatch, capsys, installed):
    real = importlib.util.find_spec
    if installed:  # as it looks to who asks
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: name == "transformer_engine" or real(name, *rest),
        )
    status = cli.main(["verify", str(tiny()), str(imported()), "--implementation", "te"])
    said = capsys.readouterr().err
    assert status == 2 and "--implementation te: " in said and "use --implementation local" in said
    assert "torch sees no GPU" in said
    assert ("Transformer Engine is not installed" in said) == (not installed)
