"""Core attention on torch's scaled_dot_product_attention.

S: sequence, B: batch, N: query heads, G: key-value heads, D: head dimension, V: its value one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class SDPACoreAttention(MegatronModule):
    """Causal attention in O(S) memory where torch has a kernel for it, on any device.

    Upstream's local ``DotProductAttention`` holds the [B, N, S, S] scores and builds its causal
    mask on the current CUDA device. This builds no mask at all.

    Args:
        config: Of the layer.
        layer_number: Unused; part of what upstream passes.
        attn_mask_type: Must be causal.
        attention_type: Must be "self".
        attention_dropout: None takes the config's.
        softmax_scale: None takes 1/sqrt(D).
        cp_comm_type: Unused; part of what upstream passes.
        pg_collection: Unused; part of what upstream passes.

    Raises:
        ValueError: Another mask or attention type, context parallelism, windows, or scaling by
            layer number.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object | None = None,
        **_mla: object,
    ):
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise ValueError(
                "SDPACoreAttention: expected causal self-attention, got "
                f"{attn_mask_type} and {attention_type!r}"
            )
        unsupported = {
            "context_parallel_size": config.context_parallel_size > 1,
            "window_size": config.window_size is not None,
            "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
        }
        if named := [name for name, is_set in unsupported.items() if is_set]:
            raise ValueError(
                f"SDPACoreAttention does not support {', '.join(named)}; unset it, or build the "
                'head with implementation="te"'
            )
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.attention_dropout = dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_SBND: Tensor,
        key_SBGD: Tensor,
        value_SBGV: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object | None = None,
    ) -> Tensor:
        """Attend causally; query heads i·N/G to (i+1)·N/G - 1 share key-value head i.

        Returns:
            [S, B, N·V], of the query's dtype.

        Raises:
            ValueError: Packed sequences, a mask or a bias.
        """
        if packed_seq_params is not None:
            raise ValueError(
                "packed sequences: this attention takes [s, b, n, d] only. Pad every sequence to "
                'a row of its own, or build the head with implementation="te".'
            )
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "attention_mask and attention_bias: expected None, this attention is causal. "
                "Padding behind a sequence needs no mask: no token before it sees it."
            )
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_SBGD, value_SBGV))
        out_BNSV = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=self.attention_dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out_BNSV.permute(2, 0, 1, 3).flatten(2)
