"""A head of one layer as K draft steps: against transformers' layer, imported, verified, exported.

    pytest tests/tools/mtp_checkpoint/test_served_steps.py
"""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.support import parallel_world, prepare
from tests.support.device import device
from tests.tools.mtp_checkpoint.native_support import (
    Kind,
    directory,
    hidden_states,
    inputs,
    reference,
)
from tools.mtp_checkpoint import verifying
from tools.mtp_checkpoint.checkpoint import MANIFEST, load_head
from tools.mtp_checkpoint.cli import EXIT_ERROR, main
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import FAMILIES, by_name
from tools.mtp_checkpoint.importing import import_directory, import_head
from tools.mtp_checkpoint.native.layer import build_mtp_block
from tools.mtp_checkpoint.reference import ReferenceHead
from tools.mtp_checkpoint.reference_chain import served_chain, trained_chain
from tools.mtp_checkpoint.served import Served

prepare()

DEPTHS = 3
KINDS = {
    "qwen3_5_moe": Kind("qwen3_5_moe", "packed", "fp32"),
    "qwen3_5": Kind("qwen3_5", "dense", "fp32"),
    "deepseek_v3": Kind("deepseek_v3", "per-expert", "fp32"),
    "mimo": Kind("mimo", "dense", "fp32"),
}
SERVED = {  # what each engine's own model file returns to its proposer
    ("qwen3_5_moe", "vllm"): "post-norm",
    ("qwen3_5_moe", "sglang"): "post-norm",
    ("qwen3_5", "vllm"): "post-norm",
    ("qwen3_5", "sglang"): "post-norm",
    ("deepseek_v3", "vllm"): "pre-norm",
    ("deepseek_v3", "sglang"): "post-norm",
    ("mimo", "vllm"): "post-norm",
    ("mimo", "sglang"): "post-norm",
}


def served(name, engine, depths=DEPTHS):
    return Served.of(by_name(name), depths, engine)


def head_of(kind, groups, how):
    head = build_mtp_block(directory(kind).config, groups=groups, device=device(), served=how)
    import_head(directory(kind), head, groups)
    return head


def depths_of(head, kind, given):
    return hidden_states(head, kind, *given).chunk(head.served.depths, dim=1)


def test_the_table_says_of_every_family_what_its_engines_feed_back():
    found = {(f.name, engine): fed for f in FAMILIES for engine, fed in f.feedback.items()}
    assert found == SERVED


@pytest.mark.parametrize("name, engine", SERVED)
def test_every_step_is_that_of_transformers_layer(name, engine):
    kind, given = KINDS[name], inputs(batch=2, length=16)
    with parallel_world() as groups, torch.no_grad():
        head = head_of(kind, groups, served(name, engine))
        assert head.config.transformer.mtp_hidden_feedback == SERVED[name, engine]
        names = {key for key in head.sharded_state_dict()}
        assert all(key.startswith("mtp.layers.0.") for key in names) and names
        # Steps side by side in [S, B, H]: transposed to [B, K·S, H].
        got = depths_of(head, kind, given)
    want = trained_chain(reference(kind), *given, DEPTHS, engine)
    other = "sglang" if SERVED[name, engine] == "pre-norm" else None
    for step, (ours_BSH, (theirs_BSH, _)) in enumerate(zip(got, want, strict=True)):
        assert (ours_BSH - theirs_BSH).abs().max() <= 1e-5, step
    if other:
        wrong = trained_chain(reference(kind), *given, DEPTHS, other)
        assert torch.equal(wrong[0][0], want[0][0])
        assert all((a - b).abs().max() > 1e-2 for (a, _), (b, _) in zip(wrong[1:], want[1:]))


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3"])
def test_gradients_of_the_last_step_are_those_through_transformers_layers(name):
    kind, given, engine = KINDS[name], inputs(batch=2, length=12), "vllm"
    source = directory(kind)
    weights_BSH = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(1))
    model = ReferenceHead.from_directory(source).requires_grad_(True)
    (trained_chain(model, *given, DEPTHS, engine)[-1][0] * weights_BSH).sum().backward()
    with parallel_world() as groups:
        head = head_of(kind, groups, served(name, engine))
        (depths_of(head, kind, given)[-1] * weights_BSH).sum().backward()
    norms = {"norm.weight": head.mtp.layers[0].final_layernorm.weight}
    norms["pre_fc_norm_hidden.weight"] = head.mtp.layers[0].hnorm.weight
    norms["fc.weight"] = head.mtp.layers[0].eh_proj.weight
    wanted = dict(model.named_parameters())
    for key, parameter in norms.items():
        want = wanted[key].grad
        assert want.any()
        error = (parameter.grad.cpu() - want).abs().max() / want.abs().max()
        assert error <= 5e-6, f"{key}: {error:.1e}"


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3"])
def test_one_depth_is_to_the_bit_what_it_was(name):
    kind, given = KINDS[name], inputs(batch=2, length=12)
    with parallel_world() as groups, torch.no_grad():
        one, several = head_of(kind, groups, Served()), head_of(kind, groups, served(name, "vllm"))
        want_BSH = hidden_states(one, kind, *given)
        assert torch.equal(depths_of(several, kind, given)[0], want_BSH)
    assert served(name, "vllm", 1) == Served()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_served_attention_is_that_of_steps_made_one_after_the_other(engine):
    """A cache of step 1 up to t, then rows of their own: a causal pass over just these rows."""
    head, (ids_BS, positions_BS, hidden_BSH) = reference(KINDS["deepseek_v3"]), inputs(2, 10)
    got = served_chain(head, ids_BS, positions_BS, hidden_BSH, DEPTHS, engine)
    for t in (0, 3, 6):
        rows_BLH = head.joined(ids_BS, hidden_BSH, 1)[:, : t + 1]
        for step in range(1, DEPTHS + 1):
            length = rows_BLH.shape[1]
            causal_LL = torch.ones(length, length, dtype=torch.bool).tril()
            positions_BL = torch.arange(length).expand(2, length)
            x_BLH, _ = head.run_layer(rows_BLH, positions_BL, causal_LL)
            state_B1H = head.norm(x_BLH[:, -1:])
            assert (got[step - 1][:, t : t + 1] - state_B1H).abs().max() <= 1e-5, (t, step)
            fed_B1H = x_BLH[:, -1:] if engine == "vllm" else state_B1H
            filled_BSH = fed_B1H.expand_as(hidden_BSH)
            rows_BLH = torch.cat(
                [rows_BLH, head.joined(ids_BS, filled_BSH, step + 1)[:, t : t + 1]], dim=1
            )


def options_of(source, checkpoint, *words):
    parser = argparse.ArgumentParser()
    verifying.add_arguments(parser)
    options = parser.parse_args([*map(str, words), "--sequences", "2", "--length", "20"])
    options.directory, options.checkpoint = Path(source), Path(checkpoint)
    return options


def checks_of(report):
    return {check["name"]: check["passed"] for check in report["checks"]}


def test_verify_compares_every_step_and_notices_a_feedback_that_is_not_the_engines(tmp_path):
    source = directory(KINDS["deepseek_v3"]).path
    import_directory(source, tmp_path / "ckpt", depths=DEPTHS, engine="vllm")
    manifest = json.loads((tmp_path / "ckpt" / MANIFEST).read_text())
    assert manifest["served"] == dataclasses.asdict(Served(DEPTHS, "vllm", "pre-norm"))
    words = ("--rows-from", "random", "--json", tmp_path / "report.json")
    assert verifying.run(options_of(source, tmp_path / "ckpt", *words)) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    steps = {name for name in checks_of(report) if name.startswith("depth ")}
    assert len(steps) == 6 * (DEPTHS - 1)

    manifest["served"]["hidden_feedback"] = "post-norm"
    (tmp_path / "ckpt" / MANIFEST).write_text(json.dumps(manifest))
    assert verifying.run(options_of(source, tmp_path / "ckpt", *words)) == 1
    failed = {
        name
        for name, passed in checks_of(json.loads((tmp_path / "report.json").read_text())).items()
        if not passed
    }
    assert all(name.startswith("depth ") for name in failed)
    for depth in (2, 3):
        assert f"depth {depth}: hidden state, max |Δ|, routers agreeing" in failed


def test_the_layer_on_disk_is_the_same_whatever_the_depths(tmp_path):
    source = directory(KINDS["qwen3_5"]).path
    for depths in (1, DEPTHS):
        import_directory(source, tmp_path / str(depths), depths=depths)
    assert "served" not in json.loads((tmp_path / "1" / MANIFEST).read_text())
    with parallel_world() as groups:
        one, several = (load_head(tmp_path / str(d), groups=groups) for d in (1, DEPTHS))
        # Either is loaded as the other, too.
        as_several = load_head(tmp_path / "1", groups=groups, served=several.served)
    assert (one.served.depths, several.served.depths) == (1, DEPTHS)
    for other in (several, as_several):
        for (name, want), (same, got) in zip(one.named_parameters(), other.named_parameters()):
            assert name == same and torch.equal(got, want)


def test_a_family_that_does_not_say_what_is_fed_back_has_one_depth():
    silent = dataclasses.replace(by_name("qwen3_5"), feedback={})
    assert Served.of(silent, 1, "vllm") == Served()
    with pytest.raises(CheckpointError, match="--depths 2: the table of qwen3_5 does not say which"):
        Served.of(silent, 2, "vllm")


@pytest.mark.parametrize(
    "depths, engine, message",
    [(0, "vllm", "--depths must be at least 1, got 0"), (2, "trt", "--engine must be vllm or sg")],
)
def test_depths_and_engines_that_mean_nothing_are_refused(depths, engine, message):
    with pytest.raises(CheckpointError, match=message):
        Served.of(by_name("qwen3_5"), depths, engine)


def test_the_command_refuses_no_depths_and_writes_nothing(tmp_path, capsys):
    source = directory(KINDS["qwen3_5"]).path
    words = ["import", str(source), "--out", str(tmp_path / "ckpt"), "--depths", "0"]
    assert main(words) == EXIT_ERROR
    assert "--depths must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize(
    "found",
    [
        {"depths": 2, "hidden_feedback": "norm"},
        {"depths": "2"},
        {"depths": 0},
        {"engine": "trt"},
        {"steps": 2},
        [2],
        None,
    ],
    ids=str,
)
def test_a_manifest_that_makes_no_sense_is_refused(found):
    with pytest.raises(CheckpointError, match="mtp_head.json: served is .*import the head again"):
        Served.read({"served": found})
