"""Which tokens a context-parallel rank owns: the plain reference that tests compare with.

With context parallelism over n ranks every sequence is cut into 2n chunks of equal length; rank r
owns chunks r and 2n-1-r ("zigzag": causal attention costs every rank the same). Written as a plain
loop, independent of how the product and upstream do it.
"""

from __future__ import annotations

from typing import Iterable, Sequence

import torch


def zigzag_indices(
    total: int, cp: int, rank: int, cu_seqlens: Iterable[int] | None = None
) -> list[int]:
    """Global positions owned by ``rank``, in the order in which it holds them.

    Args:
        total: Number of tokens in the whole row.
        cp: Context-parallel size.
        rank: Rank in the context-parallel group.
        cu_seqlens: Starts of the packed sequences, padding included, and ``total`` at the end.
            None: one sequence.

    Raises:
        ValueError: A sequence does not split into ``2 * cp`` chunks, or the sequences do not
            cover ``total``.

    Example:
        >>> zigzag_indices(8, cp=2, rank=0)
        [0, 1, 6, 7]
        >>> zigzag_indices(12, cp=2, rank=1, cu_seqlens=[0, 8, 12])
        [2, 3, 4, 5, 9, 10]
    """
    starts = [0, total] if cu_seqlens is None else [int(start) for start in cu_seqlens]
    if starts[0] != 0 or starts[-1] != total:
        raise ValueError(f"sequences {starts} must start at 0 and end at {total}")
    if cp == 1:
        return list(range(total))
    owned: list[int] = []
    for start, end in zip(starts, starts[1:]):
        if (end - start) % (2 * cp):
            raise ValueError(
                f"a sequence of {end - start} tokens does not split into {2 * cp} chunks for "
                f"cp={cp}: pad it to a multiple of {2 * cp}"
            )
        chunk = (end - start) // (2 * cp)
        for piece in (rank, 2 * cp - 1 - rank):
            owned.extend(range(start + piece * chunk, start + (piece + 1) * chunk))
    return owned


def shard(
    tensor_BS: torch.Tensor, cp: int, rank: int, cu_seqlens: Iterable[int] | None = None
) -> torch.Tensor:
    """The part of a whole tensor that ``rank`` holds.

    Args:
        tensor_BS: [b, s, ...], any dtype.
        cp: Context-parallel size.
        rank: Rank in the context-parallel group.
        cu_seqlens: As in `zigzag_indices`.

    Returns:
        [b, s / cp, ...], a copy.
    """
    owned = zigzag_indices(tensor_BS.size(1), cp, rank, cu_seqlens)
    return tensor_BS[:, torch.tensor(owned, device=tensor_BS.device)]


def unshard(
    shards_BS: Sequence[torch.Tensor], cu_seqlens: Iterable[int] | None = None
) -> torch.Tensor:
    """The whole tensor, from the parts of all ranks in rank order.

    Args:
        shards_BS: One [b, s / cp, ...] tensor per rank.
        cu_seqlens: As in `zigzag_indices`.

    Returns:
        [b, s, ...]
    """
    cp = len(shards_BS)
    total = sum(part.size(1) for part in shards_BS)
    starts = None if cu_seqlens is None else [int(start) for start in cu_seqlens]
    order = [i for rank in range(cp) for i in zigzag_indices(total, cp, rank, starts)]
    joined_BS = torch.cat(list(shards_BS), dim=1)
    whole_BS = torch.empty_like(joined_BS)
    whole_BS[:, torch.tensor(order, device=joined_BS.device)] = joined_BS
    return whole_BS
