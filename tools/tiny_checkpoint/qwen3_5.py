"""Qwen3.5 and Qwen3.6, MoE and dense."""

from __future__ import annotations

from typing import Any

from tools.tiny_checkpoint.family import LAYOUTS, Shapes, Sizes, TinyFamily, gated_mlp


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
        initializer_range=0.02,
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
        return shapes | gated_mlp(mlp, hidden, sizes.dense_intermediate)
    shapes |= {f"{mlp}.gate.weight": (sizes.experts, hidden)}
    shapes |= gated_mlp(f"{mlp}.shared_expert", hidden, sizes.shared_intermediate)
    shapes |= {f"{mlp}.shared_expert_gate.weight": (1, hidden)}
    inner = sizes.expert_intermediate
    if layout == "packed":
        return shapes | {
            f"{mlp}.experts.gate_up_proj": (sizes.experts, 2 * inner, hidden),
            f"{mlp}.experts.down_proj": (sizes.experts, hidden, inner),
        }
    for expert in range(sizes.experts):
        shapes |= gated_mlp(f"{mlp}.experts.{expert}", hidden, inner)
    return shapes


QWEN3_5_MOE = TinyFamily(
    architecture="Qwen3_5MoeForConditionalGeneration",
    layouts=LAYOUTS,
    zero_centred=True,
    model_config=lambda sizes, tokens: _qwen_config(sizes, tokens, moe=True),
    head_shapes=lambda sizes, layout: _qwen_shapes(sizes, layout, moe=True),
    target=("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
)
QWEN3_5 = TinyFamily(
    architecture="Qwen3_5ForConditionalGeneration",
    layouts=("dense",),
    zero_centred=True,
    model_config=lambda sizes, tokens: _qwen_config(sizes, tokens, moe=False),
    head_shapes=lambda sizes, layout: _qwen_shapes(sizes, layout, moe=False),
    target=("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
)
