"""Tiny GPTModel and HybridModel instances for tests, and what tests read from them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from tests.support.device import device, has_transformer_engine
from tests.support.release import hybrid_model, release
from tests.support.weights import initialize


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What to build.

    Attributes:
        family: "gpt" (GPTModel) or "hybrid" (HybridModel).
        mtp_num_layers: Number of MTP depths; 0 builds a model without MTP.
        repeated: One MTP layer used at every depth, instead of one per depth.
        tied: Embedding and output layer share their weight.
        recompute: "none", "full" (every layer) or "selective" (core attention unless overridden).
        per_token: ``calculate_per_token_loss``.
        dtype: Of parameters and activations. Transformer Engine has no float64.
        num_layers: Decoder layers. A hybrid layer is an attention and an MLP layer of its stack.
        hidden_size: Width; the other sizes follow the config's fields of the same names.
        num_experts: Experts of every MLP; 0 for a dense model.
        transformer_engine: Build from Transformer Engine's modules (GPT only, needs a GPU).
        overrides: Any further TransformerConfig fields.
        seed: Of the weights.
    """

    family: Literal["gpt", "hybrid"] = "gpt"
    mtp_num_layers: int = 2
    repeated: bool = False
    tied: bool = False
    recompute: Literal["none", "full", "selective"] = "none"
    per_token: bool = False
    dtype: torch.dtype = torch.float64
    num_layers: int = 2
    hidden_size: int = 32
    num_attention_heads: int = 4
    vocab_size: int = 64
    max_sequence_length: int = 128
    num_experts: int = 0
    transformer_engine: bool = False
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0


def build_model(spec: ModelSpec, pg_collection: Any = None, vp_stage: int | None = None):
    """Build the model (this rank's stage of it) on `device`, in training mode.

    Weights depend on ``spec.seed`` and parameter names alone: any split of the same spec starts
    from the same weights, see `tests.support.weights`. Call it inside a `parallel_world`.

    Args:
        spec: What to build.
        pg_collection: Process groups; None takes those of the `parallel_world`.
        vp_stage: Virtual pipeline stage.

    Raises:
        ValueError: ``spec.transformer_engine`` without Transformer Engine, a GPU or "gpt".
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    config = build_config(spec, pg_collection)
    stages, stage = pg_collection.pp.size(), pg_collection.pp.rank()
    chunks, chunk = config.virtual_pipeline_model_parallel_size or 1, vp_stage or 0
    common = dict(
        config=config,
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_sequence_length,
        pre_process=stage == 0 and chunk == 0,
        post_process=stage == stages - 1 and chunk == chunks - 1,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
    build = {"gpt": _build_gpt, "hybrid": _build_hybrid}[spec.family]
    model = build(spec, common).to(device=device(), dtype=spec.dtype)
    initialize(model, pg_collection, spec.seed)
    return model


def build_config(spec: ModelSpec, pg_collection: Any):
    """The TransformerConfig of ``spec``, with the parallel sizes of ``pg_collection``."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    per_layer = 2 if spec.family == "hybrid" else 1
    fields: dict[str, Any] = dict(
        num_layers=spec.num_layers * per_layer,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        mtp_num_layers=spec.mtp_num_layers or None,
        mtp_use_repeated_layer=spec.repeated,
        calculate_per_token_loss=spec.per_token,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        params_dtype=spec.dtype,
        pipeline_dtype=spec.dtype,
        bf16=spec.dtype == torch.bfloat16,
        tensor_model_parallel_size=pg_collection.tp.size(),
        context_parallel_size=pg_collection.cp.size(),
        pipeline_model_parallel_size=pg_collection.pp.size(),
        expert_model_parallel_size=pg_collection.ep.size(),
    )
    fields.update(_recompute_fields(spec.recompute))
    if spec.num_experts:
        fields.update(
            num_moe_experts=spec.num_experts,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_ffn_hidden_size=spec.hidden_size,
            add_bias_linear=False,
        )
    fields.update(spec.overrides)
    return TransformerConfig(**fields)


def _recompute_fields(recompute: str) -> dict[str, Any]:
    return {
        "none": {},
        "selective": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
        "full": dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        ),
    }[recompute]


def _build_gpt(spec: ModelSpec, common: dict[str, Any]):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from tests.support.attention import ReferenceAttention

    experts = dict(num_experts=spec.num_experts or None, moe_grouped_gemm=False)
    if spec.transformer_engine:
        if not has_transformer_engine():
            raise ValueError("ModelSpec.transformer_engine needs Transformer Engine and a GPU")
        layer = specs.get_gpt_layer_with_transformer_engine_spec(**experts)
    else:
        layer = specs.get_gpt_layer_local_spec(
            normalization=spec.overrides.get("normalization"), **experts
        )
        layer.submodules.self_attention.submodules.core_attention = ReferenceAttention
    mtp = None
    if spec.mtp_num_layers:
        mtp = specs.get_gpt_mtp_block_spec(
            common["config"], layer, spec.transformer_engine, vp_stage=common["vp_stage"]
        )
    return GPTModel(transformer_layer_spec=layer, mtp_block_spec=mtp, **common)


def _build_hybrid(spec: ModelSpec, common: dict[str, Any]):
    from tests.support.hybrid_spec import hybrid_local_spec

    if spec.transformer_engine:
        raise ValueError("ModelSpec.transformer_engine is for the gpt family; hybrid stays local")
    layer = "*E" if spec.num_experts else "*-"
    pattern = layer * spec.num_layers + ("/" + layer) * spec.mtp_num_layers
    stack_spec = hybrid_local_spec(num_experts=spec.num_experts)
    named = "hybrid_stack_spec" if release() >= (0, 18) else "mamba_stack_spec"
    return hybrid_model()(hybrid_layer_pattern=pattern, **{named: stack_spec}, **common)


def is_mtp_param(name: str) -> bool:
    """Whether a parameter name belongs to an MTP layer (the shared embedding and head do not)."""
    return "mtp" in name.split(".")


@torch.no_grad()
def copy_parameters(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy every parameter of ``source`` into ``target``, which must have the same ones.

    Raises:
        ValueError: The parameter names differ; the message lists those on one side only.
    """
    values, into = dict(source.named_parameters()), dict(target.named_parameters())
    if different := sorted(values.keys() ^ into.keys()):
        raise ValueError(f"copy_parameters: only on one side: {different}")
    for name, parameter in into.items():
        parameter.copy_(values[name])
