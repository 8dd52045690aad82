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
    local, shifts = layout.position_T.numel(), list(shifts)
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
        sources = [
            torch.cat([field.detach(), halo], dim=-1)
            for field, halo in zip(fields, _exchange_chunk_heads(fields, reach, layout))
        ]
    shifted = []
    for k in shifts:
        if k == 0:
            shifted.append(list(fields))
            continue
        index_T, inside_T = _source_index(k, reach, layout)
        shifted.append(
            [s.index_select(-1, index_T).masked_fill(~inside_T, 0) for s in sources]
        )
    return shifted


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


def _source_index(k: int, reach: int, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Index into [local tokens | gathered chunk heads], and whether t + k is a real token."""
    sequence_T = layout.sequence_T
    target_T = layout.position_T + k
    inside_T = target_T < layout.length_N[sequence_T]
    local = sequence_T.numel()
    local_T = torch.arange(local, device=sequence_T.device) + k
    if layout.cp_group is None:
        # Boundaries may name more tokens than the row has.
        return local_T.clamp(max=local - 1), inside_T & (local_T < local)
    cp = layout.cp_size
    chunk_T = layout.chunk_N[sequence_T]
    target_chunk_T = target_T // chunk_T
    stays_T = target_chunk_T == layout.position_T // chunk_T
    owner_T = torch.minimum(target_chunk_T, 2 * cp - 1 - target_chunk_T).clamp(min=0)
    half_T = (target_chunk_T >= cp).long()
    head_T = ((owner_T * layout.length_N.numel() + sequence_T) * 2 + half_T) * reach
    halo_T = local + head_T + target_T % chunk_T
    index_T = torch.where(stays_T, local_T, halo_T)
    return torch.where(inside_T, index_T, 0), inside_T


def _exchange_chunk_heads(
    fields: Sequence[Tensor], reach: int, layout: SequenceLayout
) -> list[Tensor]:
    """The first ``reach`` tokens of every chunk of the group, per field [..., cp · n · 2 · reach].

    Fields of all dtypes travel as bytes in one all-gather.
    """
    half = torch.arange(2, device=layout.start_N.device)[None, :, None]
    ahead = torch.arange(reach, device=layout.start_N.device)[None, None, :]
    chunk = layout.chunk_N[:, None, None]
    head_N2K = layout.start_N[:, None, None] + half * chunk + torch.minimum(ahead, chunk - 1)
    head = head_N2K.flatten().clamp(max=layout.position_T.numel() - 1)
    heads = [field.detach().index_select(-1, head).contiguous() for field in fields]
    sent = torch.cat([h.flatten().view(torch.uint8) for h in heads])
    received_C = torch.empty(
        layout.cp_size * sent.numel(), dtype=torch.uint8, device=sent.device
    )
    torch.distributed.all_gather_into_tensor(received_C, sent, group=layout.cp_group)
    halos, start = [], 0
    for h in heads:
        size = h.numel() * h.element_size()
        block = received_C.view(layout.cp_size, -1)[:, start : start + size].contiguous()
        block = block.view(h.dtype).view(layout.cp_size, *h.shape)
        halos.append(block.movedim(0, -2).flatten(-2))
        start += size
    return halos
