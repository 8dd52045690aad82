"""Where the tokens of one rank sit in their sequences.

Shape suffixes: B batch rows, T token positions this rank holds, N sequences, K largest shift.

BSHD batches are one sequence per row; THD batches are one row that holds N sequences back to back.
Under context parallelism (CP) every sequence is cut into 2·cp equal chunks and rank r owns chunks r
and 2·cp-1-r of each ("zigzag"), front chunk first. Both formats are described by the same fields, so
one shift serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective.checks import require_condition


@dataclass(frozen=True)
class SequenceLayout:
    """Positions of the local tokens, without any value that has to be read on the host.

    Attributes:
        cp_group: the context-parallel group, None when every sequence is whole on this rank.
        sequence_T: int64 [t], the sequence each local token belongs to (tokens behind the last
            sequence count to the last one and lie outside its length).
        position_T: int64 [t], position of each local token in its sequence.
        length_N: int64 [n], real tokens of each sequence, over all CP ranks.
        chunk_N: int64 [n], tokens of one chunk (≥ 1), over padding; the padded length at CP=1.
        start_N: int64 [n], local index of the sequence's first local token.
    """

    cp_group: Optional[torch.distributed.ProcessGroup]
    sequence_T: Tensor
    position_T: Tensor
    length_N: Tensor
    chunk_N: Tensor
    start_N: Tensor

    @property
    def cp_size(self) -> int:
        """Ranks that share each sequence."""
        return 1 if self.cp_group is None else self.cp_group.size()

    @property
    def cp_rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.cp_group is None else self.cp_group.rank()

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        packed_seq_params: Optional[PackedSeqParams] = None,
        cp_group: Optional[torch.distributed.ProcessGroup] = None,
    ) -> SequenceLayout:
        """The layout of a per-token field.

        Args:
            tensor: any field with the local tokens in its last dimension, [b, t] for BSHD or
                [1, t] for THD.
            packed_seq_params: sequence boundaries over **all** CP ranks, for THD.
                ``cu_seqlens_q_padded`` says where sequences start when they are padded;
                ``cu_seqlens_q`` says how many tokens of each are real. Its ``cp_group``, if set
                (dynamic context parallelism), replaces the argument.
            cp_group: context-parallel group, None or size 1 for none.

        Raises:
            ValueError: ``cu_seqlens_q`` is missing, or a (padded) length is not a multiple of
                2·cp, or a BSHD row does not split into two chunks.
        """
        if packed_seq_params is not None and packed_seq_params.cp_group is not None:
            cp_group = packed_seq_params.cp_group
        if cp_group is not None and cp_group.size() == 1:
            cp_group = None
        cp_size = 1 if cp_group is None else cp_group.size()
        if packed_seq_params is None:
            lengths_N = starts_N = None
        else:
            lengths_N, starts_N = _packed_bounds(packed_seq_params, tensor.device, cp_size)
        return cls._build(tensor, lengths_N, starts_N, cp_group, cp_size)

    @classmethod
    def _build(cls, tensor, lengths_N, cu_padded, cp_group, cp_size) -> SequenceLayout:
        local, device = tensor.size(-1), tensor.device
        chunks_here = 1 if cp_size == 1 else 2
        if lengths_N is None:
            if local % chunks_here:
                raise ValueError(
                    f"Context parallelism needs an even number of local positions per row, "
                    f"got {local}: pad each row to a multiple of 2·cp = {2 * cp_size}."
                )
            lengths_N = torch.full((1,), local * cp_size, device=device)
            cu_padded = torch.cat([torch.zeros_like(lengths_N), lengths_N])
        cu_local = cu_padded // cp_size
        index_T = torch.arange(local, device=device)
        sequence_T = torch.searchsorted(cu_local[1:].contiguous(), index_T, right=True)
        sequence_T = sequence_T.clamp(max=lengths_N.numel() - 1)
        start_N = cu_local[:-1]
        chunk_N = ((cu_local[1:] - start_N) // chunks_here).clamp(min=1)
        offset_T = index_T - start_N[sequence_T]
        if cp_size == 1:
            position_T = offset_T
        else:
            rank, chunk_T = cp_group.rank(), chunk_N[sequence_T]
            second_T = offset_T >= chunk_T
            first_chunk = torch.where(second_T, 2 * cp_size - 1 - rank, rank)
            position_T = first_chunk * chunk_T + offset_T - second_T * chunk_T
            position_T = torch.where(index_T < cu_local[-1], position_T, 2 * cp_size * chunk_T)
        return cls(cp_group, sequence_T, position_T, lengths_N, chunk_N, start_N)


def _packed_bounds(params: PackedSeqParams, device: torch.device, cp_size: int):
    """Real lengths [n] and padded cumulative lengths [n + 1], int64."""
    real = params.cu_seqlens_q
    if real is None:
        raise ValueError(
            "Packed sequences need packed_seq_params.cu_seqlens_q, got None: "
            "pass the cumulative sequence lengths, int32 [n + 1]."
        )
    padded = params.cu_seqlens_q_padded
    padded = real if padded is None else padded
    if padded.shape != real.shape:
        raise ValueError(
            f"cu_seqlens_q_padded must have the shape of cu_seqlens_q, {tuple(real.shape)}, "
            f"got {tuple(padded.shape)}."
        )
    real = real.to(device=device, dtype=torch.int64)
    padded = padded.to(device=device, dtype=torch.int64)
    lengths_N, padded_N = real[1:] - real[:-1], padded[1:] - padded[:-1]
    if cp_size > 1:
        given = padded_N.tolist() if device.type == "cpu" else "(on the device)"
        require_condition(
            (padded_N % (2 * cp_size) == 0).all(),
            f"Context parallelism over {cp_size} ranks needs packed lengths that are multiples of "
            f"2·cp = {2 * cp_size}, got {given}: pad each sequence and pass "
            f"packed_seq_params.cu_seqlens_q_padded.",
        )
    return lengths_N, padded
