"""From whole RL trajectories to one rank's part of a batch, packed (THD) or padded (BSHD).

Both split every sequence over context-parallel ranks in zigzag order and carry prediction-aligned
labels and masks, so that one forward call takes their fields as they are:

    trajectories  10 11 12 | 20 21             pad_to_multiple=4, CP=1
    packed        10 11 12 __ 20 21 __ __      one row, boundaries in packed_seq_params
    padded        10 11 12 __                  one row each
                  20 21 __ __

Shape suffixes: B batch rows, T local positions, N sequences.
"""

import math
from dataclasses import dataclass
from typing import Sequence

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective.checks import require_mask_like, require_token_ids
from megatron.core.transformer.mtp_objective.layout import zigzag_chunks
from megatron.core.transformer.mtp_objective.targets import IGNORED_LABEL
from megatron.core.transformer.mtp_objective.trajectories import prediction_aligned_targets


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
    _require_trajectories(tokens, token_masks, cp_size, cp_rank, pad_to_multiple)
    device = tokens[0].device
    lengths = [sequence.numel() for sequence in tokens]
    padded = [_padded_length(length, cp_size, pad_to_multiple) for length in lengths]

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


@dataclass(frozen=True)
class PaddedTrajectories:
    """One rank's part of a padded (BSHD) batch, every field [b, t].

    Attributes:
        tokens: int64, padding holds ``pad_token``.
        position_ids: int64, of the whole sequence.
        labels: int64, next tokens, -100 where a sequence has none.
        loss_mask: float32, weight of each label.
        padding_mask: bool, true on padding, as the ``padding_mask`` of forward.
    """

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    padding_mask: Tensor


def pad_trajectories(
    tokens: Sequence[Tensor],
    token_masks: Sequence[Tensor],
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    pad_to_multiple: int = 1,
    pad_token: int = 0,
) -> PaddedTrajectories:
    """Give each trajectory a row, padded on the right to the longest, take one rank's part.

    Causal attention keeps the padding out of the real tokens; its labels are -100.

    Args and errors are those of ``pack_trajectories``.
    """
    _require_trajectories(tokens, token_masks, cp_size, cp_rank, pad_to_multiple)
    device = tokens[0].device
    longest = max(1, max(sequence.numel() for sequence in tokens))
    length = _padded_length(longest, cp_size, pad_to_multiple)

    rows = torch.full((len(tokens), length), pad_token, dtype=torch.int64, device=device)
    masks = torch.zeros(len(tokens), length, device=device)
    padding = torch.ones(len(tokens), length, dtype=torch.bool, device=device)
    for row, (sequence, token_mask) in enumerate(zip(tokens, token_masks)):
        rows[row, : sequence.numel()] = sequence
        masks[row, : sequence.numel()] = token_mask.to(masks.dtype)
        padding[row, : sequence.numel()] = False
    labels, loss_mask = prediction_aligned_targets(rows, masks)
    next_is_padding = torch.ones_like(padding)
    next_is_padding[:, :-1] = padding[:, 1:]
    labels = labels.masked_fill(next_is_padding, IGNORED_LABEL)
    positions = torch.arange(length, device=device).expand(len(tokens), length)
    own = _zigzag_indices([0], [length], cp_size, cp_rank, device)
    fields = (rows, positions, labels, loss_mask, padding)
    return PaddedTrajectories(*(field[:, own] for field in fields))


def _require_trajectories(
    tokens: Sequence[Tensor],
    token_masks: Sequence[Tensor],
    cp_size: int,
    cp_rank: int,
    pad_to_multiple: int,
) -> None:
    """Refuse what cannot become a batch; arguments and errors as in ``pack_trajectories``."""
    for name, given in (("tokens", tokens), ("token_masks", token_masks)):
        if isinstance(given, Tensor):
            raise TypeError(
                f"{name} must be a list with one tensor [length] per trajectory, got a tensor "
                f"{tuple(given.shape)}: pass list({name}) or unpad the rows first."
            )
    if not tokens or len(tokens) != len(token_masks):
        raise ValueError(
            f"Expected at least one trajectory and one mask for each, got "
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


def _padded_length(length: int, cp_size: int, pad_to_multiple: int) -> int:
    """The next multiple that context parallelism splits into 2·cp chunks and that the caller asks."""
    multiple = math.lcm(1 if cp_size == 1 else 2 * cp_size, pad_to_multiple)
    return -(-length // multiple) * multiple


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
