"""What each family's tiny checkpoint looks like: its configuration and the tensors of its head.

Sizes are tiny but uneven on purpose: more query heads than key-value heads, heads × head_dim
different from the hidden size, 2·I different from H. A mapping that mixes two of them up then
meets a shape that does not fit.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

LAYOUTS = ("per-expert", "packed")
Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the tiny model.

    Attributes:
        hidden: Width H of the residual stream, a multiple of 8.
        experts: Number of routed experts E; two are active per token.
        vocab: Rows of the embedding; the tokenizer is trained to this many tokens.
    """

    hidden: int = 64
    experts: int = 8
    vocab: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    expert_intermediate: int = 48
    shared_intermediate: int = 40
    dense_intermediate: int = 112


@dataclasses.dataclass(frozen=True)
class TinyFamily:
    """One family.

    Attributes:
        architecture: The string in ``architectures`` of config.json, the same for all layouts.
        layouts: Expert layouts in which checkpoints of this family are found.
        zero_centred: Whether its norms store w and apply 1 + w.
        model_config: Sizes and a dict of token ids to the contents of config.json.
        head_shapes: Sizes and layout to the head's keys and shapes, in checkpoint order.
        target: The transformers classes (configuration, model) of the target; None where only
            the embedding, the final norm and the output layer are written.
    """

    architecture: str
    layouts: tuple[str, ...]
    zero_centred: bool
    model_config: Callable[[Sizes, dict[str, int]], dict[str, Any]]
    head_shapes: Callable[[Sizes, str], Shapes]
    target: tuple[str, str] | None = None


def _qwen_config(sizes: Sizes, tokens: dict[str, int], moe: bool) -> dict[str, Any]:
    """A nested configuration: language model with a linear and a full attention layer, vision."""
    name = "qwen3_5_moe" if moe else "qwen3_5"
    rotary_pairs = sizes.head_dim // 8  # a quarter of the head, in pairs
    text = dict(
        model_type=f"{name}_text",
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        attention_bias=False,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        initializer_range=0.1,
        eos_token_id=tokens["<|endoftext|>"],
        pad_token_id=tokens["<|endoftext|>"],
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e7,
            partial_rotary_factor=0.25,
            mrope_interleaved=True,
            mrope_section=[rotary_pairs - 2 * (rotary_pairs // 3)] + [rotary_pairs // 3] * 2,
        ),
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
    )
    if moe:
        text |= dict(
            num_experts=sizes.experts,
            num_experts_per_tok=2,
            moe_intermediate_size=sizes.expert_intermediate,
            shared_expert_intermediate_size=sizes.shared_intermediate,
            router_aux_loss_coef=0.001,
        )
    else:
        text |= dict(intermediate_size=sizes.dense_intermediate)
    vision = dict(
        model_type=f"{name}_vision",
        depth=1,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        patch_size=4,
        out_hidden_size=sizes.hidden,
        num_position_embeddings=16,
    )
    return dict(
        model_type=name,
        text_config=text,
        vision_config=vision,
        image_token_id=tokens["<|image_pad|>"],
        video_token_id=tokens["<|video_pad|>"],
        vision_start_token_id=tokens["<|vision_start|>"],
        vision_end_token_id=tokens["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def _qwen_shapes(sizes: Sizes, layout: str, moe: bool) -> Shapes:
    hidden, head = sizes.hidden, sizes.head_dim
    queries, keys = sizes.heads * head, sizes.kv_heads * head
    layer = "mtp.layers.0"
    shapes: Shapes = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_norm.weight": (head,),
        f"{layer}.self_attn.k_norm.weight": (head,),
        f"{layer}.self_attn.q_proj.weight": (2 * queries, hidden),  # per head: query, then gate
        f"{layer}.self_attn.k_proj.weight": (keys, hidden),
        f"{layer}.self_attn.v_proj.weight": (keys, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
    }
    mlp = f"{layer}.mlp"
    if not moe:
        return shapes | _gated_mlp(mlp, hidden, sizes.dense_intermediate)
    shapes |= {f"{mlp}.gate.weight": (sizes.experts, hidden)}
    shapes |= _gated_mlp(f"{mlp}.shared_expert", hidden, sizes.shared_intermediate)
    shapes |= {f"{mlp}.shared_expert_gate.weight": (1, hidden)}
    inner = sizes.expert_intermediate
    if layout == "packed":
        return shapes | {
            f"{mlp}.experts.gate_up_proj": (sizes.experts, 2 * inner, hidden),
            f"{mlp}.experts.down_proj": (sizes.experts, hidden, inner),
        }
    for expert in range(sizes.experts):
        shapes |= _gated_mlp(f"{mlp}.experts.{expert}", hidden, inner)
    return shapes


def _gated_mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _deepseek_config(sizes: Sizes, tokens: dict[str, int]) -> dict[str, Any]:
    return dict(
        model_type="deepseek_v3",
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_hidden_layers=2,
        num_nextn_predict_layers=1,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=20,
        attention_bias=False,
        intermediate_size=sizes.dense_intermediate,
        moe_intermediate_size=sizes.expert_intermediate,
        n_routed_experts=sizes.experts,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=4096,
        eos_token_id=tokens["<|endoftext|>"],
        tie_word_embeddings=False,
    )


def _deepseek_shapes(sizes: Sizes, layout: str) -> Shapes:
    config = _deepseek_config(sizes, {"<|endoftext|>": 0})
    hidden, heads = sizes.hidden, sizes.heads
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    query_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    layer = f"model.layers.{config['num_hidden_layers']}"  # the head follows the decoder layers
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    shapes: Shapes = {
        f"{layer}.embed_tokens.weight": (sizes.vocab, hidden),  # a copy of the target's
        f"{layer}.enorm.weight": (hidden,),
        f"{layer}.hnorm.weight": (hidden,),
        f"{layer}.eh_proj.weight": (hidden, 2 * hidden),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{attention}.q_a_proj.weight": (query_rank, hidden),
        f"{attention}.q_a_layernorm.weight": (query_rank,),
        f"{attention}.q_b_proj.weight": (heads * (nope + rope), query_rank),
        f"{attention}.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        f"{attention}.kv_a_layernorm.weight": (kv_rank,),
        f"{attention}.kv_b_proj.weight": (heads * (nope + config["v_head_dim"]), kv_rank),
        f"{attention}.o_proj.weight": (hidden, heads * config["v_head_dim"]),
        f"{mlp}.gate.weight": (sizes.experts, hidden),
        f"{mlp}.gate.e_score_correction_bias": (sizes.experts,),
    }
    for expert in range(sizes.experts):
        shapes |= _gated_mlp(f"{mlp}.experts.{expert}", hidden, sizes.expert_intermediate)
    shapes |= _gated_mlp(f"{mlp}.shared_experts", hidden, sizes.expert_intermediate)
    return shapes | {
        f"{layer}.shared_head.norm.weight": (hidden,),
        f"{layer}.shared_head.head.weight": (sizes.vocab, hidden),  # a copy of the target's
    }


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
        **_gated_mlp(f"{layer}.mlp", hidden, sizes.dense_intermediate),
    }


FAMILIES: dict[str, TinyFamily] = {
    "qwen3_5_moe": TinyFamily(
        architecture="Qwen3_5MoeForConditionalGeneration",
        layouts=LAYOUTS,
        zero_centred=True,
        model_config=lambda sizes, tokens: _qwen_config(sizes, tokens, moe=True),
        head_shapes=lambda sizes, layout: _qwen_shapes(sizes, layout, moe=True),
        target=("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
    ),
    "qwen3_5": TinyFamily(
        architecture="Qwen3_5ForConditionalGeneration",
        layouts=("dense",),
        zero_centred=True,
        model_config=lambda sizes, tokens: _qwen_config(sizes, tokens, moe=False),
        head_shapes=lambda sizes, layout: _qwen_shapes(sizes, layout, moe=False),
        target=("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    ),
    "deepseek_v3": TinyFamily(
        architecture="DeepseekV3ForCausalLM",
        layouts=("per-expert",),
        zero_centred=False,
        model_config=_deepseek_config,
        head_shapes=_deepseek_shapes,
    ),
    "mimo": TinyFamily(
        architecture="MiMoForCausalLM",
        layouts=("dense",),
        zero_centred=False,
        model_config=_mimo_config,
        head_shapes=_mimo_shapes,
    ),
}
