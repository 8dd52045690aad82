"""Held-out loss, and how often the head drafts what the frozen model would say.

Shape suffixes: B samples, S positions, H hidden size, N rows, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.finetune_mtp_head.batch import Batch
from examples.finetune_mtp_head.objective import Objective
from tests.support import device

_ROWS = 1024  # rows whose logits are in memory at once


@dataclass(frozen=True)
class Evaluation:
    """Means over all held-out targets.

    Attributes:
        loss: cross-entropy against the text, in nats per token.
        accuracy: share of targets that are the head's first choice.
        acceptance: share of positions at which the head's first choice is the frozen model's own,
            which it makes one position later: what greedy speculative decoding would accept.
        targets: how many.
    """

    loss: float
    accuracy: float
    acceptance: float
    targets: int


@torch.no_grad()
def evaluate(
    head: Callable[..., Tensor],
    objective: Objective,
    batches: Iterable[Batch],
    group: torch.distributed.ProcessGroup,
) -> Evaluation:
    """Evaluate over the ranks of a group; each passes its own microbatches, equally many.

    Where several ranks pass the same samples, they count as often: the means do not change.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=device())
    for batch in batches:
        hidden_BSH = objective.target.hidden(batch.tokens_BS)
        head_BSH = objective.head_hidden(head, batch, hidden_BSH).transpose(0, 1)
        sums += _sums(objective, batch, hidden_BSH, head_BSH)
    torch.distributed.all_reduce(sums, group=group)
    loss, right, accepted, targets = sums.tolist()
    targets = max(targets, 1.0)
    return Evaluation(loss / targets, right / targets, accepted / targets, int(sums[3]))


def _sums(objective: Objective, batch: Batch, hidden_BSH: Tensor, head_BSH: Tensor) -> Tensor:
    """Loss, hits, accepted drafts and targets of a microbatch, float64 [4]."""
    rows, positions = batch.targets.masks_DBS[0].nonzero(as_tuple=True)
    labels_N = batch.targets.labels_DBS[0][rows, positions]
    sums = torch.zeros(4, dtype=torch.float64, device=device())
    for part in torch.arange(len(rows), device=device()).split(_ROWS):
        row_N, position_N, label_N = rows[part], positions[part], labels_N[part]
        logits_NV = objective.logits(head_BSH[row_N, position_N]).float()
        draft_N = logits_NV.argmax(-1)
        # The model says token t + 2 at position t + 1, which exists: the label lies there.
        own_N = objective.target.greedy(hidden_BSH[row_N, position_N + 1])
        loss = torch.nn.functional.cross_entropy(logits_NV, label_N, reduction="none")
        found = (loss, draft_N == label_N, draft_N == own_N, torch.ones_like(loss))
        sums += torch.stack([value.sum(dtype=torch.float64) for value in found])
    return sums
