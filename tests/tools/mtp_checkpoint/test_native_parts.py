"""The norm and the attention that upstream's local layer lacks, and what the head refuses."""

import importlib.util

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support import parallel_world, prepare, run_ranks
from tests.support.device import device
from tests.tools.mtp_checkpoint.native_support import Kind, directory, inputs
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.native.attention import SDPACoreAttention
from tools.mtp_checkpoint.native.config import head_config
from tools.mtp_checkpoint.native.layer import build_mtp_block
from tools.mtp_checkpoint.native.norm import ZeroCentredRMSNorm

prepare()


def _config(**overrides):
    fields = dict(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        attention_dropout=0.0,
    )
    return TransformerConfig(**fields | overrides)


def _norm(w, eps=1e-6):
    norm = ZeroCentredRMSNorm(_config(params_dtype=w.dtype), w.numel(), eps)
    norm.weight.data.copy_(w)
    return norm


def test_the_norm_applies_one_plus_w():
    x, w = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, -0.5])
    # The mean square of 3, 4 is 12.5.
    want = torch.tensor([[3.0 * 2.0, 4.0 * 0.5]]) / 12.5**0.5
    assert torch.allclose(_norm(w, eps=0.0)(x), want)


def test_the_norm_holds_a_w_that_one_plus_w_would_lose():
    w = torch.tensor([1e-5, -3e-3], dtype=torch.bfloat16)
    held = _norm(w).weight
    assert torch.equal(held.data, w)
    assert not torch.equal((1 + w) - 1, w)


def test_the_norm_of_bfloat16_is_the_float32_one_rounded():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=generator).bfloat16()
    w = torch.randn(8, generator=generator).bfloat16()
    assert torch.equal(_norm(w)(x), _norm(w.float())(x.float()).bfloat16())


def test_attention_is_upstreams_without_its_mask():
    config = _config()
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(9, 2, 4, 16, generator=generator).to(device())
    key, value = torch.randn(2, 9, 2, 2, 16, generator=generator).to(device())
    mask = torch.ones(9, 9, dtype=torch.bool, device=device()).triu(1)[None, None]
    with parallel_world() as groups:
        args = dict(layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
        want = DotProductAttention(config, **args, pg_collection=groups)(query, key, value, mask)
        got = SDPACoreAttention(config, **args, pg_collection=groups)(query, key, value, None)
    assert got.shape == want.shape == (9, 2, 64)
    assert (got - want).abs().max() <= 1e-6


def _attention(config=None, mask_type=AttnMaskType.causal):
    return SDPACoreAttention(config or _config(), 1, mask_type, "self")


def test_attention_refuses_what_it_would_get_wrong():
    x = torch.zeros(4, 1, 4, 16)
    with pytest.raises(ValueError, match="packed sequences.*row of its own"):
        _attention()(x, x, x, None, packed_seq_params=PackedSeqParams(qkv_format="thd"))
    with pytest.raises(ValueError, match="attention_mask.*expected None"):
        _attention()(x, x, x, torch.zeros(1, 1, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="expected causal self-attention"):
        _attention(mask_type=AttnMaskType.no_mask)
    with pytest.raises(ValueError, match="does not support window_size"):
        _attention(_config(window_size=(8, 0)))


def test_the_head_refuses_multimodal_positions_and_shapes_that_do_not_fit():
    ids_BS, positions_BS, hidden_BSH = (x.to(device()) for x in inputs(batch=2, length=8))
    hidden_SBH = hidden_BSH.transpose(0, 1)
    embed = torch.nn.Embedding(768, 64, device=device())
    with parallel_world() as groups:
        head = build_mtp_block(directory(Kind()).config, groups=groups)
        with pytest.raises(ValueError, match="images and videos are not supported"):
            head(ids_BS, positions_BS.expand(3, 2, 8), hidden_SBH, embed)
        with pytest.raises(ValueError, match=r"hidden \[8, 2, 64\].*got .*\[2, 8, 64\]"):
            head(ids_BS, positions_BS, hidden_BSH, embed)
        with pytest.raises(ValueError, match="position_ids of the same shape"):
            head(ids_BS, positions_BS[:1], hidden_SBH, embed)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="Transformer Engine is installed here",
)
def test_the_transformer_engine_head_says_that_it_needs_transformer_engine():
    with parallel_world() as groups:
        with pytest.raises(CheckpointError, match="Transformer Engine is not installed.*local"):
            build_mtp_block(directory(Kind()).config, groups=groups, implementation="te")


def _build_with_tensor_parallelism():
    with parallel_world(tp=2) as groups:
        build_mtp_block(directory(Kind()).config, groups=groups)


def test_tensor_parallelism_is_refused():
    directory(Kind())  # made before the ranks fork
    with pytest.raises(AssertionError, match="expected tp, pp and cp of size 1.*'tp': 2"):
        run_ranks(_build_with_tensor_parallelism, 2)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="mamba"), "model_type 'mamba' is not known"),
        (dict(rms_norm_eps=None), "has no rms_norm_eps"),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu', expected 'silu'"),
        (dict(attention_bias=True), "attention_bias is True, expected False"),
        (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "rope_type is .yarn."),
        (dict(rope_parameters=dict(rope_type="default")), "has no rope_theta"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_configuration_that_the_layer_cannot_express_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        head_config(directory(Kind()).text_config | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_experts_per_tok=4), "2 · topk_group; got 4 and 1"),
        (dict(norm_topk_prob=False), "norm_topk_prob is False, expected True"),
        (dict(rope_scaling=dict(type="yarn", factor=40)), "original_max_position_embeddings"),
    ],
    ids=["groups", "weights", "yarn"],
)
def test_a_router_or_rotary_embedding_unlike_deepseeks_is_refused(changes, message):
    text = directory(Kind("deepseek_v3", "per-expert", "fp32")).text_config
    with pytest.raises(CheckpointError, match=message):
        head_config(text | changes)


def test_experts_must_divide_over_the_ranks():
    with pytest.raises(CheckpointError, match="8 experts do not divide over 3 ranks"):
        head_config(directory(Kind()).config, expert_parallel_size=3)
