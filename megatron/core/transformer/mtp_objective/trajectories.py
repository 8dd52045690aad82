"""From RL trajectories to what one forward call needs.

RL frameworks keep masks per token ("this token was sampled by the policy"); a language model predicts
the next one. Here the two meet, in one place, and no target ever crosses a sequence boundary:

    tokens       10 11 12 13 | 20 21        token_mask   0  0  1  1 |  0  1
    labels       11 12 13  – | 21  –        loss_mask    0  1  1  0 |  1  0        (– is -100)

Shape suffixes: B batch rows, T local positions, N sequences.
"""

import math
from dataclasses import dataclass
from typing import Optional, Sequence

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective.checks import (
    require_condition,
    require_mask_like,
    require_token_ids,
)
from megatron.core.transformer.mtp_objective.layout import SequenceLayout, zigzag_chunks
from megatron.core.transformer.mtp_objective.shift import shift_fields
from megatron.core.transformer.mtp_objective.targets import IGNORED_LABEL


def prediction_aligned_targets(
    tokens: Tensor,
    token_mask: Tensor,
    packed_seq_params: Optional[PackedSeqParams] = None,
    cp_group: Optional[torch.distributed.ProcessGroup] = None,
) -> tuple[Tensor, Tensor]:
    """Labels and loss mask for ``forward(labels=..., loss_mask=...)`` from a token-aligned mask.

    Args:
        tokens: int [b, t]; padded rows (BSHD), or [1, t] with ``packed_seq_params`` (THD). Under
            context parallelism this rank's part.
        token_mask: [b, t], bool or number: weight of each token as a prediction target, 0 for
            prompt and padding. A trainer's own gating (positive advantages only, …) is a factor
            of this mask.
        packed_seq_params: sequence boundaries over all CP ranks, for THD.
        cp_group: context-parallel group, when the tensors are one rank's part.

    Returns:
        ``labels`` int64 [b, t], the next token, -100 where the sequence has none; ``loss_mask``
        [b, t] in ``token_mask``'s dtype, the next token's mask, 0 there.

    Raises:
        TypeError: tokens that are not integers, a mask that is not real-valued.
        ValueError: shapes that differ; packed sequences that the row does not hold, or several
            packed rows; lengths that context parallelism cannot split.
    """
    require_token_ids("tokens", tokens)
    require_mask_like("token_mask", token_mask, "tokens", tokens)
    layout = SequenceLayout.of(tokens, packed_seq_params, cp_group)
    if packed_seq_params is not None:
        _require_packed_row(tokens, packed_seq_params, layout.cp_size)
    exists = torch.ones_like(tokens, dtype=torch.bool)
    labels, loss_mask, exists = shift_fields([tokens.long(), token_mask, exists], [1], layout)[0]
    return labels.masked_fill(~exists, IGNORED_LABEL), loss_mask


@dataclass(frozen=True)
class PackedTrajectories:
    """One rank's part of a packed (THD) batch; every field but the last is [1, t].

    Attributes:
        tokens: int64, padding holds ``pad_token``.
        position_ids: int64, restart with every sequence.
        labels: int64, next tokens, -100 where a sequence has none.
        loss_mask: float32, weight of each label.
        packed_seq_params: boundaries over all context-parallel ranks.
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    packed_seq_params: PackedSeqParams


def pack_trajectories(
    tokens: Sequence[Tensor],
    token_masks: Sequence[Tensor],
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    pad_to_multiple: int = 1,
    pad_token: int = 0,
) -> PackedTrajectories:
    """Lay trajectories back to back, pad each so that it can be split, take one rank's part.

    Args:
        tokens: per trajectory, int [length], prompt and answer.
        token_masks: per trajectory, [length], 1 where the token was sampled and counts.
        cp_size: context-parallel size; lengths are padded to a multiple of 2·cp when it is > 1.
        cp_rank: this rank's place in its context-parallel group.
        pad_to_multiple: a further divisor of each padded length (tensor parallelism, kernels).
        pad_token: id that fills the padding.

    Raises:
        TypeError: tokens that are not integers, or one tensor instead of a list of them.
        ValueError: no trajectory, or one that is not one-dimensional, or masks that do not fit the
            tokens, or a rank outside ``cp_size``, or a multiple below 1.
    """
    for name, given in (("tokens", tokens), ("token_masks", token_masks)):
        if isinstance(given, Tensor):
            raise TypeError(
                f"{name} must be a list with one tensor [length] per trajectory, got a tensor "
                f"{tuple(given.shape)}: pass list({name}) or unpad the rows first."
            )
    if not tokens or len(tokens) != len(token_masks):
        raise ValueError(
            f"pack_trajectories needs at least one trajectory and one mask for each, got "
            f"{len(tokens)} trajectories and {len(token_masks)} masks."
        )
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in [0, {cp_size}), got {cp_rank}.")
    if pad_to_multiple < 1:
        raise ValueError(f"pad_to_multiple must be at least 1, got {pad_to_multiple}.")
    for index, (sequence, mask) in enumerate(zip(tokens, token_masks)):
        require_token_ids(f"tokens[{index}]", sequence)
        if sequence.dim() != 1:
            raise ValueError(
                f"tokens[{index}] must be one trajectory, [length], got shape "
                f"{tuple(sequence.shape)}: pass a list with one tensor per trajectory."
            )
        require_mask_like(f"token_masks[{index}]", mask, f"tokens[{index}]", sequence)
    device = tokens[0].device
    chunks = 1 if cp_size == 1 else 2 * cp_size
    multiple = math.lcm(chunks, pad_to_multiple)
    lengths = [sequence.numel() for sequence in tokens]
    padded = [-(-length // multiple) * multiple for length in lengths]

    row = torch.full((1, sum(padded)), pad_token, dtype=torch.int64, device=device)
    mask = torch.zeros(1, sum(padded), device=device)
    starts = [sum(padded[:n]) for n in range(len(padded))]
    for start, sequence, token_mask in zip(starts, tokens, token_masks):
        row[0, start : start + sequence.numel()] = sequence
        mask[0, start : start + sequence.numel()] = token_mask.to(mask.dtype)
    params = _packed_seq_params(lengths, padded, device)
    labels, loss_mask = prediction_aligned_targets(row, mask, params)
    position_ids = torch.cat([torch.arange(n, device=device) for n in padded]).unsqueeze(0)
    own = _zigzag_indices(starts, padded, cp_size, cp_rank, device)
    fields = (field[:, own] for field in (row, position_ids, labels, loss_mask))
    return PackedTrajectories(*fields, packed_seq_params=params)


def _require_packed_row(tokens: Tensor, params: PackedSeqParams, cp_size: int) -> None:
    """Boundaries of more tokens than the row holds mean that ``cp_group`` was forgotten."""
    if tokens.dim() != 2 or tokens.size(0) != 1:
        raise ValueError(f"Packed tokens must be one row [1, t], got {tuple(tokens.shape)}.")
    padded = params.cu_seqlens_q_padded
    last = (params.cu_seqlens_q if padded is None else padded)[-1]
    require_condition(
        last <= tokens.size(1) * cp_size,
        f"The packed sequences end at token {{shown}}, but {cp_size} context-parallel rank(s) with "
        f"{tokens.size(1)} tokens each hold fewer: pass cp_group with one rank's part of a row.",
        last,
    )


def _packed_seq_params(
    lengths: list[int], padded: list[int], device: torch.device
) -> PackedSeqParams:
    def cumulative(values):
        ends = torch.tensor([0] + values, dtype=torch.int32, device=device)
        return ends.cumsum(0, dtype=torch.int32)

    real, full = cumulative(lengths), cumulative(padded)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=full,
        cu_seqlens_kv_padded=full,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )


def _zigzag_indices(
    starts: list[int], padded: list[int], cp_size: int, cp_rank: int, device: torch.device
) -> Tensor:
    """Global indices of the tokens ``cp_rank`` owns, in its local order."""
    if cp_size == 1:
        return torch.arange(sum(padded), device=device)
    parts = []
    for start, length in zip(starts, padded):
        chunk = length // (2 * cp_size)
        for part in zigzag_chunks(cp_size, cp_rank):
            parts.append(torch.arange(chunk, device=device) + start + part * chunk)
    return torch.cat(parts)
