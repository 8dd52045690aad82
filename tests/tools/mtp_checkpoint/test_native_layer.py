"""The native head computes what transformers' layers compute, and leaves its inputs alone.

B: batch, S: sequence, H: hidden size.
"""

import dataclasses
import json
import shutil

import pytest
import torch

from tests.support import parallel_world, prepare
from tests.support.device import device
from tests.tools.mtp_checkpoint.native_support import (
    Kind,
    directory,
    hidden_states,
    imported,
    inputs,
    reference,
)
from tools.mtp_checkpoint.importing import import_head
from tools.mtp_checkpoint.native.layer import build_mtp_block
from tools.mtp_checkpoint.reference import ReferenceHead
from tools.mtp_checkpoint.source import HFDirectory
from tools.tiny_checkpoint.weights import write_shards

prepare()

KINDS = (
    Kind("qwen3_5_moe", "per-expert", "fp32"),
    Kind("qwen3_5_moe", "packed", "bf16"),
    Kind("qwen3_5", "dense", "bf16"),
    Kind("mimo", "dense", "fp32"),
    Kind("deepseek_v3", "per-expert", "fp32"),
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_hidden_states_are_those_of_transformers_layers(kind):
    ids_BS, positions_BS, hidden_BSH = inputs()
    want_BSH, _ = reference(kind)(ids_BS, positions_BS, hidden_BSH)
    with parallel_world() as groups:
        got_BSH = hidden_states(imported(kind, groups), kind, ids_BS, positions_BS, hidden_BSH)
    assert want_BSH.std() > 0.5
    assert (got_BSH - want_BSH).abs().max() <= 5e-6


def test_multi_latent_attention_with_yarn_is_transformers_one():
    kind = KINDS[4]
    yarn = dict(type="yarn", factor=40, original_max_position_embeddings=16)
    yarn |= dict(beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
    plain = directory(kind)
    scaled = dataclasses.replace(plain, config=plain.config | {"rope_scaling": yarn})
    ids_BS, positions_BS, hidden_BSH = inputs()
    model = ReferenceHead.from_directory(scaled)
    want_BSH, _ = model(ids_BS, positions_BS, hidden_BSH)
    unscaled_BSH, _ = reference(kind)(ids_BS, positions_BS, hidden_BSH)
    with parallel_world() as groups:
        head = build_mtp_block(scaled.config, groups=groups, device=device())
        import_head(scaled, head, groups)
        got_BSH = hidden_states(head, kind, ids_BS, positions_BS, hidden_BSH)
        with pytest.raises(ValueError, match="consecutive positions only"):
            hidden_states(head, kind, ids_BS, 2 * positions_BS, hidden_BSH)
    assert (unscaled_BSH - want_BSH).abs().max() > 1e-2
    assert (got_BSH - want_BSH).abs().max() <= 5e-6


def test_positions_need_not_start_at_zero_nor_be_the_same_in_every_row():
    kind = KINDS[0]
    ids_BS, _, hidden_BSH = inputs(batch=2, length=24)
    gap_S = torch.arange(24) + 40 * (torch.arange(24) >= 10)
    positions_BS = torch.stack([gap_S, torch.arange(24) + 7])
    want_BSH, _ = reference(kind)(ids_BS, positions_BS, hidden_BSH)
    plain_BSH, _ = reference(kind)(ids_BS, torch.arange(24).expand(2, 24), hidden_BSH)
    with parallel_world() as groups:
        got_BSH = hidden_states(imported(kind, groups), kind, ids_BS, positions_BS, hidden_BSH)
    assert (plain_BSH - want_BSH)[0].abs().max() > 1e-2  # the gap matters
    assert (got_BSH - want_BSH).abs().max() <= 5e-6


@pytest.mark.parametrize("kind", KINDS[1:3], ids=str)
def test_gradients_are_those_of_transformers_layers(kind, tmp_path):
    """The import is linear: importing the reference's gradients gives the native ones."""
    ids_BS, positions_BS, hidden_BSH = inputs()
    weights_BSH = torch.randn(4, 24, 64, generator=torch.Generator().manual_seed(1))
    source = directory(kind)
    model = ReferenceHead.from_directory(source).requires_grad_(True)
    (model(ids_BS, positions_BS, hidden_BSH)[0] * weights_BSH).sum().backward()
    shutil.copy(source.path / "config.json", tmp_path)
    gradients = {f"mtp.{name}": p.grad for name, p in model.named_parameters()}
    write_shards(tmp_path, [gradients])

    with parallel_world() as groups:
        head = imported(kind, groups)
        out_BSH = hidden_states(head, kind, ids_BS, positions_BS, hidden_BSH)
        (out_BSH * weights_BSH).sum().backward()
        want = build_mtp_block(source.config, groups=groups, device=device())
        import_head(HFDirectory.open(tmp_path), want, groups)
    for (name, got), expected in zip(head.named_parameters(), want.parameters(), strict=True):
        assert expected.abs().max() > 0, name
        error = (got.grad - expected).abs().max() / expected.abs().max()
        assert error <= 5e-6, f"{name}: {error:.1e}"


@pytest.mark.parametrize("how", ["plain", "under inference_mode", "requiring a gradient"])
def test_the_callers_tensors_stay_as_they_are(how):
    kind = KINDS[0]
    ids_BS, positions_BS, hidden_BSH = (x.to(device()) for x in inputs())
    embedding_VH = reference(kind).embedding_VH.to(device(), copy=True)
    embedding = torch.nn.Embedding.from_pretrained(embedding_VH, freeze=False)
    with torch.inference_mode(how == "under inference_mode"):
        hidden_SBH = hidden_BSH.transpose(0, 1).contiguous()
    if how == "requiring a gradient":
        hidden_SBH.requires_grad_(True)
    before = hidden_SBH.detach().clone()
    with parallel_world() as groups:
        head = imported(kind, groups)
        head(ids_BS, positions_BS, hidden_SBH, embedding).square().sum().backward()
    assert hidden_SBH.requires_grad == (how == "requiring a gradient")
    assert hidden_SBH.grad is None and embedding.weight.grad is None
    assert torch.equal(hidden_SBH.detach(), before)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())


def test_bfloat16_inputs_are_cast_for_a_float32_head():
    kind = KINDS[0]
    ids_BS, positions_BS, hidden_BSH = (x.to(device()) for x in inputs())
    embedding = torch.nn.Embedding.from_pretrained(reference(kind).embedding_VH.to(device()))
    rounded_SBH = hidden_BSH.transpose(0, 1).bfloat16()
    with parallel_world() as groups:
        head = imported(kind, groups)
        got = head(ids_BS, positions_BS, rounded_SBH, embedding.bfloat16())
        # The embedding's weight is rounded by now.
        want = head(ids_BS, positions_BS, rounded_SBH.float(), embedding.float())
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


def test_a_bfloat16_head_is_near_the_float32_one():
    kind = KINDS[1]
    ids_BS, positions_BS, hidden_BSH = inputs()
    want_BSH, _ = reference(kind)(ids_BS, positions_BS, hidden_BSH)
    with parallel_world() as groups:
        head = imported(kind, groups, torch.bfloat16)
        got_BSH = hidden_states(head, kind, ids_BS, positions_BS, hidden_BSH)
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    assert got_BSH.dtype == torch.bfloat16
    # Rows whose router sees a tie may go to other experts: compare the median.
    assert (got_BSH.float() - want_BSH).abs().median() <= 2e-2


def test_every_parameter_is_nan_until_something_is_loaded():
    """And a router's bias, which is stored too, but no parameter."""
    config = json.loads((directory(KINDS[4]).path / "config.json").read_text())
    with parallel_world() as groups:
        head = build_mtp_block(config, groups=groups, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert all(parameter.isnan().all() for parameter in head.parameters())
    bias = head.mtp.layers[0].mtp_model_layer.mlp.router.expert_bias
    assert bias.dtype == torch.float32 and bias.isnan().all()


def test_checkpoint_keys_are_those_of_the_transformer_engine_layer():
    """Its attention norm is part of the projection behind it, its MLP norm only if dense."""
    layer = "mtp.layers.0.transformer_layer."
    for kind, mlp_norm in (
        (KINDS[0], "pre_mlp_layernorm.weight"),
        (KINDS[2], "mlp.linear_fc1.layer_norm_weight"),
    ):
        with parallel_world() as groups:
            head = build_mtp_block(directory(kind).config, groups=groups)
            keys = {entry.key for entry in head.sharded_state_dict().values()}
        assert f"{layer}self_attention.linear_qkv.layer_norm_weight" in keys
        assert layer + mlp_norm in keys
        assert "mtp.layers.0.eh_proj.weight" in keys
