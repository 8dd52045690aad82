"""Keep rows that are no target out of the head, forward and backward."""

from typing import Optional

import torch
from torch import Tensor


def drop_unsupervised_rows(
    hidden_SBH: Tensor, mask_BS: Tensor, tp_group: Optional[torch.distributed.ProcessGroup] = None
) -> Tensor:
    """Zero the hidden rows whose prediction does not count.

    Such a row has weight 0 in the objective, but 0 times a non-finite cross-entropy is NaN in the
    backward pass; a row of zeros has a finite one. All other rows pass unchanged, to the bit.

    Args:
        hidden_SBH: [s, b, h], or this rank's [s / tp, b, h] under sequence parallelism.
        mask_BS: [b, s], zero where the prediction does not count.
        tp_group: tensor-parallel group that shares the rows, for sequence parallelism. None: rows
            that do not correspond to the mask are left alone.

    Returns:
        A tensor like ``hidden_SBH``.

    Raises:
        ValueError: the rows of a tensor-parallel group do not add up to the mask's.
    """
    drop_SB1 = (mask_BS == 0).transpose(0, 1).unsqueeze(-1)
    rows = hidden_SBH.size(0)
    if rows != drop_SB1.size(0):
        if tp_group is None:
            return hidden_SBH
        if rows * tp_group.size() != drop_SB1.size(0):
            raise ValueError(
                f"Hidden states hold {rows} rows on each of {tp_group.size()} tensor-parallel "
                f"ranks, the loss mask {drop_SB1.size(0)}: pass labels and loss_mask of the whole "
                f"(context-parallel) part of the sequence this rank works on."
            )
        drop_SB1 = drop_SB1[tp_group.rank() * rows : (tp_group.rank() + 1) * rows]
    # Keeps the strides of hidden_SBH, unlike torch.where: a matmul's rounding depends on them.
    return hidden_SBH.masked_fill(drop_SB1, 0)
