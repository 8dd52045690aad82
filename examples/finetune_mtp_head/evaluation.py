"""Held-out loss, and how often the head drafts what the frozen model would say.

Shape suffixes: B samples, S positions, H hidden size, N rows, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from examples.finetune_mtp_head.batch import Batch
from examples.finetune_mtp_head.objective import Objective
from tests.support import device

_ROWS = 1024  # rows whose logits are in memory at once
_PER_DEPTH = 4  # loss, hits, accepted drafts, targets


@dataclass(frozen=True)
class Evaluation:
    """Means over all held-out targets.

    Attributes:
        loss: cross-entropy against the text, in nats per token; with several depths, the mean of
            theirs.
        accuracy: share of the first depth's targets that are its first choice.
        acceptance: share of positions at which the first depth's first choice is the frozen
            model's own, which it makes one position later: what greedy speculative decoding
            would accept.
        targets: how many the first depth has.
        per_depth: with several depths, ``depth_1_loss``, ``depth_1_accuracy``,
            ``depth_1_acceptance`` and so on, and ``accepted_length``: the mean of 1 + the drafts up
            to the first one that the frozen model would not have made, over the positions with
            targets at every depth. Each depth reads the text's tokens, and not earlier drafts.
    """

    loss: float
    accuracy: float
    acceptance: float
    targets: int
    per_depth: dict[str, float] = field(default_factory=dict)


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
    depths = objective.config.mtp_num_layers
    sums = torch.zeros(_PER_DEPTH * depths + 2, dtype=torch.float64, device=device())
    for batch in batches:
        hidden_BSH = objective.target.hidden(batch.tokens_BS)
        head_SBH = objective.head_hidden(head, batch, hidden_BSH)
        chain_BS = length_BS = torch.ones_like(batch.loss_mask_BS, dtype=torch.float64)
        positions_BS = batch.targets.mask_BS != 0
        for depth, depth_SBH in enumerate(head_SBH.chunk(depths)):
            found, accepted_BS = _sums(
                objective, batch, hidden_BSH, depth_SBH.transpose(0, 1), depth
            )
            sums[_PER_DEPTH * depth : _PER_DEPTH * (depth + 1)] += found
            chain_BS = chain_BS * accepted_BS
            length_BS = length_BS + chain_BS
            positions_BS = positions_BS & (batch.targets.masks_DBS[depth] != 0)
        sums[-2:] += torch.stack([(length_BS * positions_BS).sum(), positions_BS.sum().double()])
    torch.distributed.all_reduce(sums, group=group)
    return _evaluation(sums.tolist(), depths)


def _evaluation(sums: list[float], depths: int) -> Evaluation:
    parts = [sums[_PER_DEPTH * d : _PER_DEPTH * (d + 1)] for d in range(depths)]
    means = [[value / max(part[3], 1.0) for value in part[:3]] for part in parts]
    per_depth = {}
    if depths > 1:
        for depth, values in enumerate(means, 1):
            names = (f"depth_{depth}_{name}" for name in ("loss", "accuracy", "acceptance"))
            per_depth |= zip(names, values)
        per_depth["accepted_length"] = sums[-2] / sums[-1] if sums[-1] else math.nan
    scored = [mean[0] for mean, part in zip(means, parts) if part[3]] or [0.0]
    loss = sum(scored) / len(scored)
    return Evaluation(loss, means[0][1], means[0][2], int(parts[0][3]), per_depth)


def _sums(
    objective: Objective, batch: Batch, hidden_BSH: Tensor, head_BSH: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """Of a microbatch at a depth (from 0): loss, hits, accepted drafts and targets, float64 [4];
    and which drafts are accepted, bool [b, s]."""
    rows, positions = batch.targets.masks_DBS[depth].nonzero(as_tuple=True)
    labels_N = batch.targets.labels_DBS[depth][rows, positions]
    sums = torch.zeros(_PER_DEPTH, dtype=torch.float64, device=device())
    accepted_BS = torch.zeros(hidden_BSH.shape[:2], dtype=torch.bool, device=device())
    for part in torch.arange(len(rows), device=device()).split(_ROWS):
        row_N, position_N, label_N = rows[part], positions[part], labels_N[part]
        logits_NV = objective.logits(head_BSH[row_N, position_N]).float()
        draft_N = logits_NV.argmax(-1)
        # The model says token t + k + 1 at position t + k, which exists: the label lies there.
        own_N = objective.target.greedy(hidden_BSH[row_N, position_N + depth + 1])
        accepted_BS[row_N, position_N] = draft_N == own_N
        loss = torch.nn.functional.cross_entropy(logits_NV, label_N, reduction="none")
        found = (loss, draft_N == label_N, draft_N == own_N, torch.ones_like(loss))
        sums += torch.stack([value.sum(dtype=torch.float64) for value in found])
    return sums, accepted_BS
