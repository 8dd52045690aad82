"""Sequences as the policy reads them: whole on one rank, a zigzag part under context parallelism.

Shape suffixes: B sequences, S positions this rank holds.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.transformer.mtp_objective import (
    SequenceLayout,
    prediction_aligned_targets,
    shift_fields,
)
from megatron.core.utils import get_batch_on_this_cp_rank


@dataclass(frozen=True)
class TrainingBatch:
    """One rank's part of a padded batch; labels and all below are prediction-aligned.

    Attributes:
        tokens_BS, positions_BS: int64.
        labels_BS: int64, the next token, -100 where there is none.
        loss_mask_BS: float32, 1 where the next token was sampled (or demonstrated).
        old_log_probs_BS: float32, the next token's log-probability when it was sampled.
        num_tokens: scalar, sum of the mask over all ranks.
    """

    tokens_BS: Tensor
    positions_BS: Tensor
    labels_BS: Tensor
    loss_mask_BS: Tensor
    old_log_probs_BS: Tensor
    num_tokens: Tensor

    @classmethod
    def of(
        cls,
        tokens_BS: Tensor,
        token_mask_BS: Tensor,
        cp_group: dist.ProcessGroup,
        log_probs_BS: Tensor | None = None,
        pad: int = 0,
    ) -> "TrainingBatch":
        """Cut this rank's part out of a batch that every rank holds whole.

        Args:
            tokens_BS: int64 [b, s] of whole sequences, padded on the right with `pad`.
            token_mask_BS: bool [b, s], true on the tokens to learn from; what lies behind the last
                of them is dropped, up to what context parallelism needs.
            cp_group: the ranks that share each sequence.
            log_probs_BS: float32 [b, s], of each token when it was sampled.
            pad: token id of padding.
        """
        if log_probs_BS is None:
            log_probs_BS = torch.zeros_like(tokens_BS, dtype=torch.float32)
        multiple = 2 * cp_group.size() if cp_group.size() > 1 else 1
        longest = 1 + int(token_mask_BS.any(dim=0).nonzero().max())
        length = -(-longest // multiple) * multiple
        part = {
            "tokens": _resize(tokens_BS, length, pad),
            "mask": _resize(token_mask_BS.float(), length, 0.0),
            "log_probs": _resize(log_probs_BS, length, 0.0),
            "positions": torch.arange(length, device=tokens_BS.device).repeat(len(tokens_BS), 1),
        }
        part = get_batch_on_this_cp_rank(part, is_hybrid_cp=False, cp_group=cp_group)
        labels_BS, loss_mask_BS = prediction_aligned_targets(
            part["tokens"], part["mask"], cp_group=cp_group
        )
        layout = SequenceLayout.of(part["tokens"], cp_group=cp_group)
        [[old_log_probs_BS]] = shift_fields([part["log_probs"]], [1], layout)
        num_tokens = loss_mask_BS.sum()
        dist.all_reduce(num_tokens, group=cp_group)
        return cls(
            part["tokens"], part["positions"], labels_BS, loss_mask_BS, old_log_probs_BS, num_tokens
        )


def _resize(field_BS: Tensor, length: int, fill: float) -> Tensor:
    missing = length - field_BS.shape[1]
    return torch.nn.functional.pad(field_BS, (0, max(missing, 0)), value=fill)[:, :length]


def sum_over(group: dist.ProcessGroup, *values: Tensor) -> list[float]:
    """Return the sums of scalar tensors over the ranks of `group`."""
    total = torch.stack([value.detach().float() for value in values])
    dist.all_reduce(total, group=group)
    return total.tolist()


def average_gradients(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace every gradient by its mean over `group`, as Megatron's DDP does."""
    if group.size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()


def share_from_first(group: dist.ProcessGroup, *tensors: Tensor) -> None:
    """Overwrite the tensors of every rank with those of the group's first rank."""
    if group.size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group_src=0, group=group)
