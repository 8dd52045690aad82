"""One parameter at a time: filled from a checkpoint, and taken apart for one.

Knows nothing of Megatron and of ranks. At no time is more than one source in memory beside the
parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.rules import Piece, Rule
from tools.mtp_checkpoint.source import HFDirectory

Observer = Callable[[Piece, Tensor], object]


@torch.no_grad()
def fill(
    rule: Rule, directory: HFDirectory, target: Tensor, observe: Observer | None = None
) -> None:
    """Fill a parameter with NaN, then with its sources, each written exactly once.

    Args:
        rule: Which sources, and how.
        directory: Where they are.
        target: The parameter; its dtype is kept.
        observe: Called with each source, while it is in memory.

    Raises:
        CheckpointError: A source is not finite, is too large for the parameter's dtype, or the
            parameter has another shape than the rule's.
    """
    if tuple(target.shape) != rule.target_shape:
        raise CheckpointError(
            f"{rule.target()} has shape {tuple(target.shape)} in the layer, the rule makes "
            f"{rule.target_shape}: layer and table do not belong together"
        )
    target.fill_(float("nan"))
    written = 0
    for index, piece in enumerate(rule.pieces):
        source = read_piece(directory, piece)
        _check_finite(piece, source)
        for ours, theirs in rule.views(index, target, source):
            ours.copy_(theirs)
            written += theirs.numel()
        if observe is not None:
            observe(piece, source)
    # As many elements as there are, and none of them still NaN: each was written exactly once.
    if written != target.numel() or target.isnan().any():
        raise CheckpointError(f"{rule.target()} was not written exactly once; the table is wrong")
    if not target.isfinite().all():
        raise CheckpointError(
            f"{rule.pieces[0].key} does not fit into {target.dtype}: values overflow. "
            "Import with --dtype fp32"
        )


@torch.no_grad()
def take(rule: Rule, index: int, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return source number ``index`` of a parameter, in ``dtype``, as the checkpoint holds it."""
    source = torch.empty(rule.pieces[index].shape, dtype=dtype)
    for ours, theirs in rule.views(index, target, source):
        theirs.copy_(ours)
    return source


def read_piece(directory: HFDirectory, piece: Piece) -> Tensor:
    """Read one source, in its own dtype; of a packed tensor one row and no more."""
    if piece.row is None:
        return directory.read(piece.key)
    return directory.read_rows(piece.key, piece.row, piece.row + 1)[0]


def _check_finite(piece: Piece, source: Tensor) -> None:
    if not source.isfinite().all():
        count = source.numel() - int(source.isfinite().sum())
        raise CheckpointError(
            f"{piece} holds {count} values that are not finite (NaN or infinite): the checkpoint "
            "is damaged, or was saved from a run that had diverged"
        )
