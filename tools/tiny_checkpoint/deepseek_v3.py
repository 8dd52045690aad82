"""DeepSeek-V3: the head is a whole decoder layer behind the last, with multi-latent attention."""

from __future__ import annotations

from typing import Any

from tools.tiny_checkpoint.family import Shapes, Sizes, TinyFamily, gated_mlp


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
        shapes |= gated_mlp(f"{mlp}.experts.{expert}", hidden, sizes.expert_intermediate)
    shapes |= gated_mlp(f"{mlp}.shared_experts", hidden, sizes.expert_intermediate)
    return shapes | {
        f"{layer}.shared_head.norm.weight": (hidden,),
        f"{layer}.shared_head.head.weight": (sizes.vocab, hidden),  # a copy of the target's
    }


DEEPSEEK_V3 = TinyFamily(
    architecture="DeepseekV3ForCausalLM",
    layouts=("per-expert",),
    zero_centred=False,
    model_config=_deepseek_config,
    head_shapes=_deepseek_shapes,
)
