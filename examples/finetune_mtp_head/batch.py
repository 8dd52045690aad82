"""Samples as tensors, with the targets of the head's depths.

Shape suffixes: B samples, S positions of a padded row.

The head at position t sees the model's hidden state of t and token t + 1, and predicts token t + 2:

    tokens       10 11 12 13        mask (assistant)   0  0  1  1
    labels       11 12 13  –        loss_mask          0  1  1  0
    depth 1      12 13  –  –        its mask           1  1  0  0     (the last two never count)
    depth 2      13  –  –  –        its mask           1  0  0  0     (reads depth 1 and t + 2)
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.finetune_mtp_head.conversations import Sample
from megatron.core.transformer.mtp_objective import (
    DepthTargets,
    depth_targets,
    prediction_aligned_targets,
)
from tests.support import device

_EMPTY_LENGTH = 3  # positions of a microbatch without samples, and one for each depth


@dataclass(frozen=True)
class Batch:
    """One microbatch on this rank's device.

    Attributes:
        tokens_BS: int64, padded on the right.
        positions_BS: int64, from 0 in each row.
        labels_BS: int64, the next token, -100 where there is none.
        loss_mask_BS: float32, 1 where the label is the assistant's.
        targets: labels and masks of the head's depths.
    """

    tokens_BS: Tensor
    positions_BS: Tensor
    labels_BS: Tensor
    loss_mask_BS: Tensor
    targets: DepthTargets

    @classmethod
    def of(cls, samples: list[Sample], pad_token: int, depths: int = 1) -> "Batch":
        """Pad samples to the longest of them; without samples, one row without targets."""
        length = max([len(sample) for sample in samples], default=0)
        length = max(length, _EMPTY_LENGTH + depths)
        rows = max(len(samples), 1)
        tokens_BS = torch.full((rows, length), pad_token, dtype=torch.int64)
        token_mask_BS = torch.zeros(rows, length)
        for row, sample in enumerate(samples):
            tokens_BS[row, : len(sample)] = sample.tokens
            token_mask_BS[row, : len(sample)] = sample.mask.float()
        tokens_BS, token_mask_BS = tokens_BS.to(device()), token_mask_BS.to(device())
        labels_BS, loss_mask_BS = prediction_aligned_targets(tokens_BS, token_mask_BS)
        positions_BS = torch.arange(length, device=device()).expand(rows, length).contiguous()
        targets = depth_targets(labels_BS, loss_mask_BS, None, num_depths=depths)
        return cls(tokens_BS, positions_BS, labels_BS, loss_mask_BS, targets)

    @property
    def num_targets(self) -> Tensor:
        """How many predictions of the first depth count, a float32 scalar."""
        return self.targets.num_targets_D[0]


def count_targets(
    batches: Iterable[Batch], group: torch.distributed.ProcessGroup
) -> Tensor:
    """Targets of each depth, of all microbatches of all ranks of a group, float64 [d]."""
    counts_ND = [torch.stack(list(batch.targets.num_targets_D)) for batch in batches]
    total = torch.stack(counts_ND).sum(0, dtype=torch.float64)
    torch.distributed.all_reduce(total, group=group)
    return total
