"""Padding masks that sequence parallelism has spread over the tensor-parallel ranks.

Shape suffixes: B batch rows, S positions of this context-parallel rank, s their part on one
tensor-parallel rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_padding_mask(
    padding_mask: Tensor, length: int, tp_group: torch.distributed.ProcessGroup
) -> Tensor:
    """The mask of all S positions, of which a depth may need any neighbour.

    Args:
        padding_mask: bool [b, S], returned as it is, or this rank's [b, s] of them.
        length: S.
        tp_group: tensor-parallel group that shares the positions.

    Raises:
        ValueError: the parts of the group do not add up to ``length``.
    """
    if padding_mask.size(-1) == length:
        return padding_mask
    _require_parts(padding_mask.size(-1), tp_group.size(), length, "input_ids")
    mine_Bs = padding_mask.to(torch.uint8).contiguous()
    parts = [torch.empty_like(mine_Bs) for _ in range(tp_group.size())]
    torch.distributed.all_gather(parts, mine_Bs, group=tp_group)
    return torch.cat(parts, dim=-1).to(padding_mask.dtype)


def scatter_padding_mask(
    padding_mask: Tensor, local_length: int, tp_group: torch.distributed.ProcessGroup
) -> Tensor:
    """This rank's [b, s] of a mask [b, S]; the mask itself where ``local_length`` is S.

    Raises:
        ValueError: S is not ``local_length`` times the size of the group.
    """
    if padding_mask.size(-1) == local_length:
        return padding_mask
    _require_parts(local_length, tp_group.size(), padding_mask.size(-1), "padding_mask")
    return padding_mask.narrow(-1, tp_group.rank() * local_length, local_length).contiguous()


def _require_parts(part: int, ranks: int, length: int, whole: str) -> None:
    if part * ranks != length:
        raise ValueError(
            f"padding_mask: {part} positions on each of {ranks} tensor-parallel ranks, but {whole} "
            f"has {length}: pass a mask of the shape of input_ids."
        )
