"""MiMo: a dense Qwen2 layer; its projection takes the hidden state first."""

from __future__ import annotations

from typing import Any

from tools.tiny_checkpoint.family import Shapes, Sizes, TinyFamily, gated_mlp


def _mimo_config(sizes: Sizes, tokens: dict[str, int]) -> dict[str, Any]:
    return dict(
        model_type="mimo",
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_hidden_layers=2,
        num_nextn_predict_layers=1,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        attention_bias=True,  # of queries, keys and values
        intermediate_size=sizes.dense_intermediate,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=640000,
        max_position_embeddings=4096,
        eos_token_id=tokens["<|endoftext|>"],
        tie_word_embeddings=False,
        use_sliding_window=False,
    )


def _mimo_shapes(sizes: Sizes, layout: str) -> Shapes:
    hidden = sizes.hidden
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    layer = "model.mtp_layers.0"
    attention = f"{layer}.self_attn"
    return {
        f"{layer}.token_layernorm.weight": (hidden,),
        f"{layer}.hidden_layernorm.weight": (hidden,),
        f"{layer}.input_proj.weight": (hidden, 2 * hidden),  # input: hidden state, then embedding
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.final_layernorm.weight": (hidden,),
        f"{attention}.q_proj.weight": (queries, hidden),
        f"{attention}.q_proj.bias": (queries,),
        f"{attention}.k_proj.weight": (keys, hidden),
        f"{attention}.k_proj.bias": (keys,),
        f"{attention}.v_proj.weight": (keys, hidden),
        f"{attention}.v_proj.bias": (keys,),
        f"{attention}.o_proj.weight": (hidden, queries),
        **gated_mlp(f"{layer}.mlp", hidden, sizes.dense_intermediate),
    }


MIMO = TinyFamily(
    architecture="MiMoForCausalLM",
    layouts=("dense",),
    zero_centred=False,
    model_config=_mimo_config,
    head_shapes=_mimo_shapes,
)
