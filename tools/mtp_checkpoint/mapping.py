"""One parameter at a time: filled from a checkpoint, and taken apart for one.

Knows nothing of Megatron and of ranks. At no time is more than one source in memory beside the
parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.report import Row, checksum
from tools.mtp_checkpoint.rules import Piece, Rule
from tools.mtp_checkpoint.source import HFDirectory


@torch.no_grad()
def fill(rule: Rule, directory: HFDirectory, target: Tensor, rank: int = 0) -> list[Row]:
    """Fill a parameter with NaN, then with its sources, each written exactly once.

    Args:
        rule: Which sources, and how.
        directory: Where they are.
        target: The parameter; its dtype is kept.
        rank: For the report.

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
    written, rows = 0, []
    for index, piece in enumerate(rule.pieces):
        source = read_piece(directory, piece)
        _check_finite(piece, source)
        for ours, theirs in rule.views(index, target, source):
            ours.copy_(theirs)
            written += theirs.numel()
        rows.append(_row(rule, piece, source, target, rank))
    # As many elements as there are, and none of them still NaN: each was written exactly once.
    if written != target.numel() or target.isnan().any():
        raise CheckpointError(f"{rule.target()} was not written exactly once; the table is wrong")
    if not target.isfinite().all():
        raise CheckpointError(
            f"{rule.pieces[0].key} does not fit into {target.dtype}: values overflow. "
            "Import with --dtype fp32"
        )
    return rows


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


def _row(rule: Rule, piece: Piece, source: Tensor, target: Tensor, rank: int) -> Row:
    return Row(
        source=str(piece),
        operation=rule.entry.operation.name,
        target=rule.target(),
        shape=tuple(source.shape),
        target_shape=tuple(target.shape),
        dtype=str(source.dtype),
        target_dtype=str(target.dtype),
        nbytes=source.numel() * source.element_size(),
        checksum=checksum(source),
        rank=rank,
    )
