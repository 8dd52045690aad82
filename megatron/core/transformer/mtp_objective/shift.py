"""The one shift of the MTP objective: every field, every depth, one exchange.

Shape suffixes: B batch rows, T local positions, N sequences, K largest shift, C context-parallel
ranks. ``shifted[t] = field[t + k]`` inside the sequence of ``t`` and zero past its last real token.
A worked example, one padded row of 8 (real length 5), k = 1: 10 11 12 13 14 . . .  becomes
11 12 13 14 0 0 0 0.

A token k positions ahead lies in the same chunk or among the first k tokens of a later one (it is
less than k past that chunk's start). So each rank sends the first K tokens of its chunks to the group,
one all-gather whatever the number of sequences, fields and shifts.
"""

from typing import Optional, Sequence

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective.layout import SequenceLayout


def shift_fields(
    fields: Sequence[Tensor], shifts: Sequence[int], layout: SequenceLayout
) -> list[list[Tensor]]:
    """Look ahead by each of ``shifts`` in every field, inside the sequence.

    Args:
        fields: per-token tensors [..., t] of any dtype, local tokens last.
        shifts: how far to look ahead, each ≥ 0; 0 returns the field as it is.
        layout: where the local tokens sit; made from a tensor with the same last dimension.

    Returns:
        One list per shift with one tensor per field, shapes and dtypes as given. Under context
        parallelism shifted fields are detached (token ids, masks and positions carry no gradient).

    Raises:
        ValueError: a negative shift, or a field whose last dimension is not the layout's.
    """
    return _shift(fields, list(shifts), layout)[0]


def shift_and_sum(
    fields: Sequence[Tensor], shifts: Sequence[int], layout: SequenceLayout
) -> tuple[list[list[Tensor]], Tensor]:
    """`shift_fields`, and the sum of the first field after each shift over all ranks.

    What a shift pushes out of a sequence are its first tokens. They are in the exchange that shifts,
    and every rank's sum of the unshifted field travels with them: no further message.

    Args:
        fields: as for `shift_fields`; the first is zero outside the sequences.
        shifts: as for `shift_fields`, at least one of them > 0.
        layout: where the local tokens sit.

    Returns:
        The shifted fields, and [shifts] sums, equal to the bit on all ranks. They have the dtype a
        sum of the field has, float32 for 16-bit ones (counts are exact up to 2^24).
    """
    half = fields[0].is_floating_point() and fields[0].element_size() < 4
    dtype = torch.float32 if half else None
    if layout.cp_group is None:
        shifted, _ = _shift(fields, list(shifts), layout)
        return shifted, torch.stack([values[0].sum(dtype=dtype) for values in shifted])
    # Differences of sums: in double precision, so that they are as exact as sums of one rank.
    wide = torch.float64 if fields[0].is_floating_point() else None
    mine = fields[0].detach().sum(dtype=wide)
    shifted, received = _shift(fields, list(shifts), layout, mine)
    heads, total_C = received
    lost = _lost_sums(heads, max(shifts), layout, mine.dtype)
    sums = total_C.sum() - torch.stack([lost[k] for k in shifts])
    if fields[0].is_floating_point():
        sums = sums.to(dtype or fields[0].dtype)
    return shifted, sums


def _shift(
    fields: Sequence[Tensor], shifts: list[int], layout: SequenceLayout, mine: Optional[Tensor] = None
) -> tuple[list[list[Tensor]], Optional[tuple[Tensor, Tensor]]]:
    """Shifted fields; with ``mine``, one number per rank, also the first field's heads and [cp]."""
    local, received = layout.position_T.numel(), None
    for field in fields:
        if field.size(-1) != local:
            raise ValueError(
                f"Each field must hold the layout's {local} local positions in its last "
                f"dimension, got shape {tuple(field.shape)}."
            )
    if any(k < 0 for k in shifts):
        raise ValueError(f"Shifts look ahead and must be ≥ 0, got {shifts}.")
    reach = max(shifts, default=0)
    sources = list(fields)
    if layout.cp_group is not None and reach > 0:
        halos, numbers_C = _exchange_chunk_heads(fields, reach, layout, mine)
        received = halos[0], numbers_C
        sources = [torch.cat([f.detach(), halo], dim=-1) for f, halo in zip(fields, halos)]
    shifted = []
    for k in shifts:
        if k == 0:
            shifted.append(list(fields))
            continue
        index_T, inside_T = source_index(k, reach, layout)
        shifted.append(
            [s.index_select(-1, index_T).masked_fill(~inside_T, 0) for s in sources]
        )
    return shifted, received


def roll_packed(
    tensor: Tensor,
    shifts: int,
    dims: int,
    packed_seq_params: PackedSeqParams,
    cp_group: Optional[torch.distributed.ProcessGroup] = None,
) -> tuple[Tensor, Tensor]:
    """Packed (THD) case of ``roll_tensor``: one step left inside every sequence.

    Args:
        tensor: [..., t] local tokens of the packed row.
        shifts: must be -1.
        dims: must name the last dimension.
        packed_seq_params: boundaries, padded ones included (see ``SequenceLayout.of``).
        cp_group: context-parallel group.

    Returns:
        The rolled tensor and the sum of its local elements.
    """
    assert (
        dims == -1 or dims == tensor.dim() - 1
    ), "Packed sequence roll only supports the last dimension."
    assert shifts == -1, "Packed sequence roll only supports a single-token left shift."
    layout = SequenceLayout.of(tensor, packed_seq_params, cp_group)
    rolled = shift_fields([tensor], [1], layout)[0][0]
    return rolled, rolled.sum()


def source_index(k: int, reach: int, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Index into [local tokens | gathered chunk heads], and whether t + k is a real token.

    Args:
        k: how far to look ahead, 1 to ``reach``.
        reach: tokens of each chunk head that were gathered.
        layout: where the local tokens sit.

    Returns:
        int64 [t] and bool [t]; the index is that of some row where there is no such token.
    """
    sequence_T = layout.sequence_T
    target_T = layout.position_T + k
    inside_T = target_T < layout.length_N[sequence_T]
    local = sequence_T.numel()
    local_T = torch.arange(local, device=sequence_T.device) + k
    if layout.cp_group is None:
        # Boundaries may name more tokens than the row has.
        return local_T.clamp(max=local - 1), inside_T & (local_T < local)
    chunk_T = layout.chunk_N[sequence_T]
    stays_T = target_T // chunk_T == layout.position_T // chunk_T
    halo_T = local + _head_index(sequence_T, target_T, reach, layout)
    index_T = torch.where(stays_T, local_T, halo_T)
    return torch.where(inside_T, index_T, 0), inside_T


def _head_index(
    sequence: Tensor, position: Tensor, reach: int, layout: SequenceLayout
) -> Tensor:
    """Index into the gathered chunk heads of positions less than ``reach`` into their chunk."""
    cp, chunk = layout.cp_size, layout.chunk_N[sequence]
    number = position // chunk
    owner = torch.minimum(number, 2 * cp - 1 - number).clamp(min=0)
    half = (number >= cp).long()
    return ((owner * layout.length_N.numel() + sequence) * 2 + half) * reach + position % chunk


def _lost_sums(heads: Tensor, reach: int, layout: SequenceLayout, dtype: torch.dtype) -> Tensor:
    """Sum over all sequences of their first 0, 1, …, ``reach`` tokens, [reach + 1].

    Args:
        heads: the field's gathered chunk heads, [..., cp · n · 2 · reach].
    """
    length_N1 = layout.length_N.unsqueeze(-1)
    position_NK = torch.arange(reach, device=heads.device).expand(length_N1.size(0), -1)
    sequence_NK = torch.arange(length_N1.size(0), device=heads.device).unsqueeze(-1)
    inside_NK = position_NK < length_N1
    index_NK = _head_index(sequence_NK, position_NK, reach, layout)
    index_NK = torch.where(inside_NK, index_NK, 0)
    first = heads.index_select(-1, index_NK.flatten()).view(-1, *index_NK.shape)
    sums_K = first.masked_fill(~inside_NK, 0).sum(dim=(0, 1), dtype=dtype)
    return torch.cat([sums_K.new_zeros(1), sums_K.cumsum(0)])


def chunk_heads(reach: int, layout: SequenceLayout) -> Tensor:
    """Local tokens at the heads of this rank's chunks, int64 [n · 2 · reach]; short ones repeat."""
    half = torch.arange(2, device=layout.start_N.device)[None, :, None]
    ahead = torch.arange(reach, device=layout.start_N.device)[None, None, :]
    chunk = layout.chunk_N[:, None, None]
    head_N2K = layout.start_N[:, None, None] + half * chunk + torch.minimum(ahead, chunk - 1)
    return head_N2K.flatten().clamp(max=layout.position_T.numel() - 1)


def _exchange_chunk_heads(
    fields: Sequence[Tensor], reach: int, layout: SequenceLayout, mine: Optional[Tensor] = None
) -> tuple[list[Tensor], Optional[Tensor]]:
    """The first ``reach`` tokens of every chunk of the group, per field [..., cp · n · 2 · reach].

    Fields of all dtypes travel as bytes in one all-gather, and ``mine``, a number of this rank: all
    ranks' are returned as [cp].
    """
    head = chunk_heads(reach, layout)
    parts = [field.detach().index_select(-1, head).contiguous() for field in fields]
    if mine is not None:
        parts.append(mine.reshape(1))
    sent = torch.cat([part.flatten().view(torch.uint8) for part in parts])
    received_C = torch.empty(
        layout.cp_size * sent.numel(), dtype=torch.uint8, device=sent.device
    )
    torch.distributed.all_gather_into_tensor(received_C, sent, group=layout.cp_group)
    halos, start = [], 0
    for part in parts:
        size = part.numel() * part.element_size()
        block = received_C.view(layout.cp_size, -1)[:, start : start + size].contiguous()
        block = block.view(part.dtype).view(layout.cp_size, *part.shape)
        halos.append(block.movedim(0, -2).flatten(-2))
        start += size
    return halos, None if mine is None else halos.pop()
