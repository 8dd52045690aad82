"""The policy: a small GPTModel with MTP heads, and the one place where it is called to train.

Shape suffixes: B sequences, S positions this rank holds, V vocabulary.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examples.online_rl.batch import TrainingBatch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support import device
from tests.support.attention import ReferenceAttention


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of the policy; `max_length` is the longest sequence in tokens."""

    hidden: int
    layers: int
    attention_heads: int
    mtp_depths: int
    vocab_size: int
    max_length: int


def build_model(
    shape: ModelShape,
    groups: ProcessGroupCollection,
    seed: int,
    objective: Mapping[str, Any] | None = None,
) -> GPTModel:
    """Build the model; the same seed gives the same weights whatever `groups` are.

    Args:
        shape: its dimensions.
        groups: process groups; `groups.cp` are the ranks that share each sequence.
        seed: of the weights.
        objective: fields of the config that say by what the heads train; None: cross-entropy.
    """
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.attention_heads,
        ffn_hidden_size=2 * shape.hidden,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        context_parallel_size=groups.cp.size(),
        mtp_num_layers=shape.mtp_depths,
        mtp_loss_scaling_factor=1.0,
        **(objective or {}),
    )
    layer_spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if groups.cp.size() > 1:  # upstream's own context-parallel attention needs Transformer Engine
        layer_spec.submodules.self_attention.submodules.core_attention = ReferenceAttention
    torch.manual_seed(seed)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(
            config, copy.deepcopy(layer_spec), use_transformer_engine=False
        ),
        pg_collection=groups,
    )
    return model.to(device())


def unshared_sequences(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """Return `groups` with a context-parallel group of one rank, for the rollout engine."""
    alone = copy.copy(groups)
    alone.cp = groups.tp
    return alone


def split_parameters(model: GPTModel) -> tuple[dict[str, torch.nn.Parameter], ...]:
    """Return (policy, heads): parameters by name, those under `mtp.` apart from all others."""
    named = dict(model.named_parameters())
    heads = {name: value for name, value in named.items() if name.startswith("mtp.")}
    return {name: value for name, value in named.items() if name not in heads}, heads


def policy_logits(
    policy: GPTModel, batch: TrainingBatch, train_heads: bool, isolated: bool
) -> Tensor:
    """Return the policy's logits [b, s, v]; their backward also trains the heads if asked.

    Args:
        policy: the model.
        batch: this rank's tokens and targets.
        train_heads: run the MTP heads on the batch's targets. The logits are the same bit for bit.
        isolated: keep the heads' objective out of everything but the heads.
    """
    return policy(
        batch.tokens_BS,
        batch.positions_BS,
        None,  # causal attention makes its own mask
        labels=batch.labels_BS,
        loss_mask=batch.loss_mask_BS,
        return_logits=True,
        compute_mtp_loss=train_heads,
        mtp_isolated_loss=isolated,
    )
