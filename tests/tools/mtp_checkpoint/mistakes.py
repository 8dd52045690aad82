"""The mistakes that keep every shape right, and nearly the cross entropy: each made on purpose.

G: key-value heads, P: query heads of each, D: head dimension.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

import torch

from tools.mtp_checkpoint.native.layer import NativeHead
from tools.mtp_checkpoint.verify_rows import Rows


def _qkv(head: NativeHead) -> tuple[torch.nn.Parameter, int, int, int]:
    """The projection's weight, rows per KV group [queries, gates, key, value], and G, P, D."""
    config = head.config.transformer
    groups = config.num_query_groups
    weight = head.mtp.layers[0].mtp_model_layer.self_attention.linear_qkv.weight
    return weight, groups, config.num_attention_heads // groups, config.kv_channels


def _split_qkv(head: NativeHead):
    weight, groups, heads, dim = _qkv(head)
    rows = weight.data.view(groups, 2 * heads + 2, dim, -1)
    return weight, rows[:, :heads], rows[:, heads : 2 * heads], rows[:, -2:-1], rows[:, -1:]


def fc_halves_swapped(head: NativeHead) -> None:
    """The projection reads [hidden, embedding]."""
    weight = head.mtp.layers[0].eh_proj.weight
    weight.data = torch.cat(weight.data.chunk(2, dim=1)[::-1], dim=1)


def w_for_one_plus_w(head: NativeHead) -> None:
    """Norms apply w."""
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data -= 1


def query_and_gate_per_head(head: NativeHead) -> None:
    """Query and gate alternate per head, as in the checkpoint."""
    weight, queries, gates, key, value = _split_qkv(head)
    both = torch.stack([queries, gates], dim=2).flatten(1, 2)
    weight.data = torch.cat([both, key, value], dim=1).flatten(0, 2)


def plain_concatenation(head: NativeHead) -> None:
    """All of q_proj, then k_proj, then v_proj."""
    weight, queries, gates, key, value = _split_qkv(head)
    both = torch.stack([queries, gates], dim=2).flatten(0, 3)
    weight.data = torch.cat([both, key.flatten(0, 2), value.flatten(0, 2)])


def experts_permuted(head: NativeHead) -> None:
    """Every expert has its neighbour's weights."""
    experts = head.mtp.layers[0].mtp_model_layer.mlp.experts.local_experts
    states = [{k: v.clone() for k, v in e.named_parameters()} for e in experts]
    for expert, state in zip(experts, states[1:] + states[:1], strict=True):
        for name, parameter in expert.named_parameters():
            parameter.data = state[name]


def gate_and_up_swapped(head: NativeHead) -> None:
    """Routed experts concatenate [up, gate]."""
    for expert in head.mtp.layers[0].mtp_model_layer.mlp.experts.local_experts:
        weight = expert.linear_fc1.weight
        weight.data = torch.cat(weight.data.chunk(2)[::-1])


def rotary_of_the_whole_head(head: NativeHead) -> None:
    """Partial rotary factor 1.0."""
    head.config = dataclasses.replace(
        head.config, rotary_dim=head.config.transformer.kv_channels
    )


def default_theta(head: NativeHead) -> None:
    """Rotary base 1e4."""
    head.config = dataclasses.replace(head.config, rotary_theta=1e4)


MISTAKES: dict[str, Callable[[NativeHead], None]] = {
    made.__name__: made
    for made in (
        fc_halves_swapped,
        w_for_one_plus_w,
        query_and_gate_per_head,
        plain_concatenation,
        experts_permuted,
        gate_and_up_swapped,
        rotary_of_the_whole_head,
        default_theta,
    )
}


class PreNormHead(torch.nn.Module):
    """A head that is fed the target's hidden states before its final norm: the ninth mistake."""

    def __init__(self, head: NativeHead, rows: Rows):
        super().__init__()
        self.head, self.rows = head, rows

    @property
    def mtp(self) -> torch.nn.Module:
        """The head's block."""
        return self.head.mtp

    def forward(self, token_ids_BS, position_ids_BS, _hidden_SBH, embed):
        """The head's hidden states from the wrong ones."""
        return self.head(
            token_ids_BS, position_ids_BS, self.rows.pre_norm_BSH.transpose(0, 1), embed
        )
