"""Which modules the head is made of: upstream's specs, with the norm and attention they lack."""

from __future__ import annotations

import dataclasses
import importlib.util

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
    get_gpt_mtp_block_spec_for_backend,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder, WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.native.attention import SDPACoreAttention
from tools.mtp_checkpoint.native.config import HeadConfig
from tools.mtp_checkpoint.native.norm import ZeroCentredRMSNorm


def block_spec(head: HeadConfig, implementation: str) -> MultiTokenPredictionBlockSubmodules:
    """The MTP block's spec: "local" (any device) or "te" (Transformer Engine, a GPU).

    Raises:
        CheckpointError: "te" where Transformer Engine is not installed.
    """
    if implementation == "te":
        return _te_spec(head)
    norm = ZeroCentredRMSNorm if head.zero_centred_norms else WrappedTorchNorm
    return get_gpt_mtp_block_spec_for_backend(
        head.transformer, _local_layer(head, norm), _NormProvider(norm)
    )


class _NormProvider(LocalSpecProvider):
    """Upstream's local modules, with one norm throughout."""

    def __init__(self, norm: LayerNormBuilder):
        self._norm = norm

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> LayerNormBuilder:
        """The norm in front of the projection and behind the layer."""
        return self._norm


def _local_layer(head: HeadConfig, norm: LayerNormBuilder) -> ModuleSpec:
    """Upstream's local layer with ``norm`` in all places and the SDPA core attention.

    Dist-checkpoint keys are those of the Transformer Engine layer, so that a model built either
    way loads the checkpoint: its attention norm is part of the projection that follows; its MLP
    norm is so only in front of a dense MLP. Of multi-latent attention, the norms of the compressed
    query and key-value are.
    """
    config = head.transformer
    layer = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        multi_latent_attention=config.multi_latent_attention,
    )
    attention = layer.self_attention
    submodules = dataclasses.replace(attention.submodules, core_attention=SDPACoreAttention)
    if config.qk_layernorm and not config.multi_latent_attention:
        submodules = dataclasses.replace(submodules, q_layernorm=norm, k_layernorm=norm)
    keys = dict(layer.sharded_state_dict_keys_map)
    if config.num_moe_experts:
        keys.pop("pre_mlp_layernorm.", None)
    if config.qk_layernorm and config.multi_latent_attention:
        for part in ("q", "kv"):
            fused = f"self_attention.linear_{part}_up_proj.layer_norm_"
            keys[f"self_attention.{part}_layernorm."] = fused
    layer = dataclasses.replace(
        layer,
        input_layernorm=norm,
        pre_mlp_layernorm=norm,
        self_attention=dataclasses.replace(attention, submodules=submodules),
        sharded_state_dict_keys_map=keys,
    )
    return ModuleSpec(module=TransformerLayer, submodules=layer)


def _te_spec(head: HeadConfig) -> MultiTokenPredictionBlockSubmodules:
    if importlib.util.find_spec("transformer_engine") is None:
        raise CheckpointError(
            'implementation "te": Transformer Engine is not installed here. Install '
            'transformer-engine[pytorch] on a machine with a GPU, or use "local".'
        )
    config = head.transformer
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        multi_latent_attention=config.multi_latent_attention,
        qk_layernorm=config.qk_layernorm,
    )
    return get_gpt_mtp_block_spec(config, layer, use_transformer_engine=True)
