"""From a Hugging Face configuration to what builds the same head in Megatron."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Callable

import torch

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import by_model_type
from tools.mtp_checkpoint.families.qwen3_5 import PARTIAL_ROTARY
from tools.mtp_checkpoint.families.rotary import rotary_kind, rotary_parameters
from tools.mtp_checkpoint.served import Served
from tools.mtp_checkpoint.source import text_config_of

IMPLEMENTATIONS = ("local", "te")


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """What `tools.mtp_checkpoint.native.layer.NativeHead` is built from.

    Attributes:
        transformer: Configuration of the layer.
        zero_centred_norms: Norms apply 1 + w.
        rotary_dim: Leading dimensions of each head that are rotated, even; 0 where the attention
            has a rotary embedding of its own.
        rotary_theta: Base of the rotary frequencies.
    """

    transformer: TransformerConfig
    zero_centred_norms: bool
    rotary_dim: int
    rotary_theta: float


def head_config(
    hf_config: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    expert_parallel_size: int = 1,
    implementation: str = "local",
    cpu: bool = True,
    served: Served = Served(),
) -> HeadConfig:
    """The configuration of the head that belongs to a config.json.

    Args:
        hf_config: Contents of config.json, or its ``text_config``.
        dtype: Of parameters and activations: float32, bfloat16 or, on the CPU, float64.
        expert_parallel_size: Ranks over which the routed experts are spread.
        implementation: "local" or "te".
        cpu: Allocate parameters on the CPU.
        served: How often the one layer is run, and on what.

    Raises:
        CheckpointError: A model type without a builder here, everything that the family's
            `config_problems` finds, or experts that the ranks cannot share.
    """
    text = text_config_of(hf_config)
    family = by_model_type(text.get("model_type"))
    build = _BUILDERS.get(family.name)
    if build is None:
        raise CheckpointError(
            f"no native head for family {family.name}; there is one for "
            f"{', '.join(sorted(_BUILDERS))}"
        )
    if problems := family.config_problems(text):
        raise CheckpointError(*problems)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    experts = text.get("num_experts") or text.get("n_routed_experts") or 0
    if experts % expert_parallel_size:
        raise CheckpointError(
            f"expert-parallel size: {experts} experts do not divide over {expert_parallel_size} "
            f"ranks; choose a divisor of {experts}"
        )
    fixed = dict(
        mtp_num_layers=served.depths,
        mtp_use_repeated_layer=served.depths > 1,
        mtp_hidden_feedback=served.hidden_feedback,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        expert_model_parallel_size=expert_parallel_size if experts else 1,
        transformer_impl="local" if implementation == "local" else "transformer_engine",
        # An import fills every parameter; `NativeHead` makes sure that nothing else does.
        perform_initialization=False,
        use_cpu_initialization=cpu,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        moe_grouped_gemm=implementation == "te" and experts > 0,
        # Of the target; the head itself is one layer behind them.
        num_layers=text["num_hidden_layers"],
    )
    return build(text, fixed)


def _rotary(text: dict[str, Any]) -> tuple[Mapping[str, Any], float]:
    """The rotary parameters of a rotary embedding, and its base."""
    rotary = rotary_parameters(text)
    return rotary, float(rotary.get("rope_theta", text.get("rope_theta")))


def _attention_fields(text: dict[str, Any]) -> dict[str, Any]:
    heads = text["num_attention_heads"]
    return dict(
        hidden_size=text["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=text.get("num_key_value_heads", heads),
        kv_channels=text.get("head_dim") or text["hidden_size"] // heads,
        normalization="RMSNorm",
        layernorm_epsilon=text["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )


def _qwen3_5(text: dict[str, Any], fixed: dict[str, Any]) -> HeadConfig:
    """Qwen3.5 and Qwen3.6, dense and MoE: gated attention, norms that apply 1 + w."""
    rotary, theta = _rotary(text)
    fields = _attention_fields(text) | dict(
        attention_output_gate=True,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
    )
    if "num_experts" in text:
        fields |= dict(
            ffn_hidden_size=text["moe_intermediate_size"],
            moe_ffn_hidden_size=text["moe_intermediate_size"],
            num_moe_experts=text["num_experts"],
            moe_router_topk=text["num_experts_per_tok"],
            # Softmax over the chosen logits is softmax over all of them, renormalised.
            moe_router_pre_softmax=False,
            moe_router_score_function="softmax",
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_shared_expert_intermediate_size=text["shared_expert_intermediate_size"],
            moe_shared_expert_gate=True,
            moe_token_dispatcher_type="alltoall",  # allgather needs equal token counts per rank
        )
    else:
        fields |= dict(ffn_hidden_size=text["intermediate_size"])
    config = TransformerConfig(**fields, **fixed)
    fraction = rotary.get(
        "partial_rotary_factor", text.get("partial_rotary_factor", PARTIAL_ROTARY)
    )
    return HeadConfig(config, True, int(config.kv_channels * fraction), theta)


def _mimo(text: dict[str, Any], fixed: dict[str, Any]) -> HeadConfig:
    """MiMo: a dense Qwen2 layer, with biases on queries, keys and values."""
    fields = _attention_fields(text) | dict(
        ffn_hidden_size=text["intermediate_size"],
        add_qkv_bias=bool(text.get("attention_bias", True)),
        persist_layer_norm=False,
    )
    config = TransformerConfig(**fields, **fixed)
    return HeadConfig(config, False, config.kv_channels, _rotary(text)[1])


def _deepseek_v3(text: dict[str, Any], fixed: dict[str, Any]) -> HeadConfig:
    """DeepSeek-V3: multi-latent attention, sigmoid router limited to groups of experts."""
    topk, groups = text["num_experts_per_tok"], text["topk_group"]
    width = text["moe_intermediate_size"]
    fields = dict(
        hidden_size=text["hidden_size"],
        num_attention_heads=text["num_attention_heads"],
        q_lora_rank=text.get("q_lora_rank"),
        kv_lora_rank=text["kv_lora_rank"],
        qk_head_dim=text["qk_nope_head_dim"],
        qk_pos_emb_head_dim=text["qk_rope_head_dim"],
        v_head_dim=text["v_head_dim"],
        qk_layernorm=True,
        layernorm_epsilon=text["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        ffn_hidden_size=width,
        moe_ffn_hidden_size=width,
        num_moe_experts=text["n_routed_experts"],
        moe_router_topk=topk,
        moe_router_num_groups=text["n_group"],
        moe_router_group_topk=groups,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=text["routed_scaling_factor"],
        moe_router_dtype="fp32",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_shared_expert_intermediate_size=width * text["n_shared_experts"],
        moe_token_dispatcher_type="alltoall",
    )
    config = MLATransformerConfig(**fields, **_mla_rotary(text), **fixed)
    return HeadConfig(config, False, 0, config.rotary_base)


def _mla_rotary(text: dict[str, Any]) -> dict[str, Any]:
    """Plain or YaRN rotary embedding, in the fields of upstream's multi-latent attention."""
    scaled = rotary_parameters(text)
    if rotary_kind(text) != "yarn":
        return dict(rope_type="rope", rotary_base=_rotary(text)[1])
    return dict(
        rope_type="yarn",
        rotary_base=float(scaled.get("rope_theta", text.get("rope_theta"))),
        rotary_scaling_factor=scaled["factor"],
        original_max_position_embeddings=scaled["original_max_position_embeddings"],
        beta_fast=scaled.get("beta_fast", 32),
        beta_slow=scaled.get("beta_slow", 1),
        mscale=scaled.get("mscale", 1.0),
        mscale_all_dim=scaled.get("mscale_all_dim", 0.0),
    )


_BUILDERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], HeadConfig]] = {
    "qwen3_5_moe": _qwen3_5,
    "qwen3_5": _qwen3_5,
    "mimo": _mimo,
    "deepseek_v3": _deepseek_v3,
}
