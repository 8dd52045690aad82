"""A HybridModel stack of local modules: attention ``*``, MLP ``-`` and MoE ``E`` layers.

Upstream's stack spec needs Transformer Engine and Mamba kernels; this one needs neither.
"""

from __future__ import annotations

import functools

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from tests.support.attention import ReferenceAttention
from tests.support.release import hybrid_block, release


def hybrid_local_spec(
    core_attention: type = ReferenceAttention, num_experts: int = 0
) -> ModuleSpec:
    """Spec for ``HybridModel(hybrid_stack_spec=...)``.

    Args:
        core_attention: Class of the core attention.
        num_experts: Experts of an ``E`` layer; 0 leaves MoE layers out.
    """
    block = hybrid_block()
    name = "Hybrid" if release() >= (0, 18) else "Mamba"
    submodules = getattr(block, name + "StackSubmodules")(
        attention_layer=_attention_layer(core_attention),
        mlp_layer=_mlp_layer(),
        mtp_block_spec=_mtp_block(),
    )
    if num_experts:
        submodules.moe_layer = _moe_layer(num_experts)
    return ModuleSpec(module=getattr(block, name + "Stack"), submodules=submodules)


def _attention_layer(core_attention: type) -> ModuleSpec:
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=core_attention,
            linear_proj=RowParallelLinear,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
        ),
    )


def _mlp_layer() -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if release() >= (0, 18):
        mlp = functools.partial(MLP.as_mlp_submodule, submodules=linears)
    else:
        mlp = ModuleSpec(module=MLP, submodules=linears)
    return ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _moe_layer(num_experts: int) -> ModuleSpec:
    moe = get_moe_module_spec(use_te=False, num_experts=num_experts, moe_grouped_gemm=False)
    return ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm, mlp=moe, mlp_bda=get_bias_dropout_add
        ),
    )


def _mtp_block() -> ModuleSpec:
    """Norms and projection alone: the inner layers come from the model's MTP pattern."""
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm,
            hnorm=WrappedTorchNorm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=None,
            layer_norm=WrappedTorchNorm,
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )
