"""Reference core attention with context parallelism, in plain torch.

Upstream has context-parallel attention only in Transformer Engine. This one gathers keys and
values over the context-parallel group and masks by sequence and position, for any floating dtype,
BSHD and THD layouts, grouped queries and dropout.

Shape suffixes: Q query rows of this rank, K key rows (gathered: of all ranks), B batch, H heads,
D head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule

from tests.support.sharding import zigzag_indices


class _GatherRows(torch.autograd.Function):
    """Concatenate the rows of all ranks; backward sums the gradient over ranks and takes ours."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


class ReferenceAttention(MegatronModule):
    """Causal core attention for a layer spec, at any context-parallel size including 1.

    Takes and returns what ``DotProductAttention`` does. Padded THD rows return zero, as with
    Transformer Engine. Without packing and context parallelism, fewer queries than keys mean the
    last rows (inference with a key-value cache).
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_unused: Any,
    ):
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.dropout = torch.nn.Dropout(dropout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [s, b, h, d], or packed [t, h, d]; this rank's rows.
            key: As ``query``, with as many or fewer heads.
            value: As ``key``.
            attention_mask: Ignored, as are the next two: the mask is causal within each sequence.
            packed_seq_params: THD boundaries of the whole row, or None for BSHD.

        Returns:
            [s, b, h * d], or packed [t, 1, h * d].
        """
        cp_group = self.cp_group
        if packed_seq_params is not None:
            query, key, value = (rows.unsqueeze(1) for rows in (query, key, value))
            cp_group = packed_seq_params.cp_group or cp_group  # dynamic context parallelism
        rows = _Rows.of(query, key, packed_seq_params, cp_group)
        if cp_group.size() > 1:
            key, value = (_GatherRows.apply(part, cp_group) for part in (key, value))
        repeats = query.size(2) // key.size(2)
        key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
        scores_BHQK = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        scores_BHQK = scores_BHQK.masked_fill(~rows.allowed_QK, float("-inf"))
        weights_BHQK = self._drop(torch.softmax(scores_BHQK, dim=-1))
        output_QBHD = torch.einsum("bhqk,kbhd->qbhd", weights_BHQK, value)
        output_QBHD = output_QBHD * rows.real_Q.to(output_QBHD.dtype)[:, None, None, None]
        return output_QBHD.flatten(2)

    def _drop(self, weights: torch.Tensor) -> torch.Tensor:
        if not self.training or self.dropout.p == 0.0:
            return weights
        if self.config.sequence_parallel:
            return self.dropout(weights)
        with get_cuda_rng_tracker().fork():
            return self.dropout(weights)


class _Rows:
    """Which keys a query may see, and which query rows are real tokens."""

    def __init__(self, allowed_QK: torch.Tensor, real_Q: torch.Tensor):
        self.allowed_QK = allowed_QK
        self.real_Q = real_Q

    @classmethod
    def of(cls, query, key, packed_seq_params, cp_group) -> "_Rows":
        cp, device = cp_group.size(), query.device
        total = key.size(0) * cp
        starts, lengths = _boundaries(total, packed_seq_params)
        owned = [zigzag_indices(total, cp, rank, starts) for rank in range(cp)]
        key_at_K = torch.tensor([i for rows in owned for i in rows], device=device)
        mine = owned[cp_group.rank()][-query.size(0) :]
        query_at_Q = torch.tensor(mine, device=device)
        sequence_of = torch.tensor(
            [i for i, (a, b) in enumerate(zip(starts, starts[1:])) for _ in range(b - a)],
            device=device,
        )
        same_QK = sequence_of[query_at_Q][:, None] == sequence_of[key_at_K][None]
        allowed_QK = same_QK & (key_at_K[None] <= query_at_Q[:, None])
        starts_Q = torch.tensor(starts, device=device)[sequence_of[query_at_Q]]
        lengths_Q = torch.tensor(lengths, device=device)[sequence_of[query_at_Q]]
        return cls(allowed_QK, query_at_Q - starts_Q < lengths_Q)


def _boundaries(total: int, packed_seq_params) -> tuple[list[int], list[int]]:
    """Starts of the sequences (padded, closed by the total) and their real lengths."""
    if packed_seq_params is None:
        return [0, total], [total]
    real = packed_seq_params.cu_seqlens_q.tolist()
    padded = packed_seq_params.cu_seqlens_q_padded
    starts = real if padded is None else padded.tolist()
    return starts, [b - a for a, b in zip(real, real[1:])]
