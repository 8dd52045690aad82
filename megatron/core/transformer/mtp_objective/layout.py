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
                ``cu_seqlens_q`` says how many tokens of each are real. With dynamic context
                parallelism its ``cp_group`` (or ``local_cp_size`` 1) replaces the argument.
            cp_group: context-parallel group, None or size 1 for none.

        Raises:
            ValueError: ``cu_seqlens_q`` is missing or no integer tensor [n + 1], or a (padded)
                length is not a multiple of 2·cp, or a BSHD row does not split into two chunks.
        """
        cp_group = _effective_cp_group(packed_seq_params, cp_group)
        cp_size = 1 if cp_group is None else cp_group.size()
        if packed_seq_params is None:
            length_N, cu_padded = _row_bounds(tensor.size(-1), tensor.device, cp_size)
        else:
            length_N, cu_padded = _packed_bounds(packed_seq_params, tensor.device, cp_size)
        cu_local = cu_padded // cp_size
        index_T = torch.arange(tensor.size(-1), device=tensor.device)
        sequence_T = torch.searchsorted(cu_local[1:].contiguous(), index_T, right=True)
        sequence_T = sequence_T.clamp(max=length_N.numel() - 1)
        start_N = cu_local[:-1]
        chunk_N = ((cu_local[1:] - start_N) // (1 if cp_size == 1 else 2)).clamp(min=1)
        position_T = index_T - start_N[sequence_T]
        if cp_size > 1:
            first, second = zigzag_chunks(cp_size, cp_group.rank())
            chunk_T = chunk_N[sequence_T]
            in_second_T = position_T >= chunk_T
            position_T = torch.where(
                in_second_T, position_T + (second - 1) * chunk_T, position_T + first * chunk_T
            )
            position_T = torch.where(index_T < cu_local[-1], position_T, 2 * cp_size * chunk_T)
        return cls(cp_group, sequence_T, position_T, length_N, chunk_N, start_N)


def zigzag_chunks(cp_size: int, cp_rank: int) -> tuple[int, int]:
    """The chunks, of 2·cp per sequence, that a context-parallel rank owns, in its local order."""
    return cp_rank, 2 * cp_size - 1 - cp_rank


def _effective_cp_group(
    params: Optional[PackedSeqParams], cp_group: Optional[torch.distributed.ProcessGroup]
) -> Optional[torch.distributed.ProcessGroup]:
    """The group that shares these sequences: that of dynamic context parallelism, if any."""
    if params is not None and params.cp_group is not None:
        cp_group = params.cp_group
    elif params is not None and params.local_cp_size == 1:
        cp_group = None
    return None if cp_group is None or cp_group.size() == 1 else cp_group


def _row_bounds(local: int, device: torch.device, cp_size: int) -> tuple[Tensor, Tensor]:
    """Length [1] and cumulative lengths [2] of a row that is one sequence, int64."""
    if cp_size > 1 and local % 2:
        raise ValueError(
            f"Context parallelism needs an even number of local positions per row, "
            f"got {local}: pad each row to a multiple of 2·cp = {2 * cp_size}."
        )
    length_N = torch.full((1,), local * cp_size, device=device)
    return length_N, torch.cat([torch.zeros_like(length_N), length_N])


def _packed_bounds(
    params: PackedSeqParams, device: torch.device, cp_size: int
) -> tuple[Tensor, Tensor]:
    """Real lengths [n] and padded cumulative lengths [n + 1], int64."""
    real, padded = params.cu_seqlens_q, params.cu_seqlens_q_padded
    padded = real if padded is None else padded
    for name, value in (("cu_seqlens_q", real), ("cu_seqlens_q_padded", padded)):
        _require_cumulative(name, value)
    if padded.shape != real.shape:
        raise ValueError(
            f"cu_seqlens_q_padded must have the shape of cu_seqlens_q, {tuple(real.shape)}, "
            f"got {tuple(padded.shape)}."
        )
    real = real.to(device=device, dtype=torch.int64)
    padded = padded.to(device=device, dtype=torch.int64)
    padded_N = padded[1:] - padded[:-1]
    if cp_size > 1:
        require_condition(
            (padded_N % (2 * cp_size) == 0).all(),
            f"Context parallelism over {cp_size} ranks needs packed lengths that are multiples of "
            f"2·cp = {2 * cp_size}, got {{shown}}: pad each sequence and pass "
            f"packed_seq_params.cu_seqlens_q_padded (a data loader that splits documents without "
            f"padding them, as --dataloader-inter-document-masking does, cannot be used here).",
            padded_N,
        )
    return torch.minimum(real[1:] - real[:-1], padded_N), padded


def _require_cumulative(name: str, value: Optional[Tensor]) -> None:
    if not isinstance(value, Tensor) or value.dim() != 1 or value.numel() < 2:
        shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"Packed sequences need packed_seq_params.{name}, the cumulative sequence lengths as "
            f"an integer tensor [n + 1], n ≥ 1; got {shown if value is not None else None}."
        )
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"packed_seq_params.{name} must have an integer dtype, got {value.dtype}.")
