"""Objectives with the policy as teacher, written out in plain torch and lists."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F

from tests.support.batches import Batch
from tests.support.objective import reference_targets


def kept_tokens(logits: Sequence[float], top_k: int, top_p: float) -> list[bool]:
    """What a sampler keeps of one row of logits, divided by the temperature already.

    Top-k keeps its k largest and what equals the smallest of them. Of the rest, the least likely
    go as long as all that went hold no more than 1 - p; the last one stays. Of equals the first
    goes.
    """
    kept = [True] * len(logits)
    if top_k:
        smallest = sorted(logits, reverse=True)[top_k - 1]
        kept = [value >= smallest for value in logits]
    if top_p == 1:
        return kept
    alive = sorted((i for i, keep in enumerate(kept) if keep), key=lambda i: (logits[i], i))
    mass = torch.tensor([logits[i] for i in alive], dtype=torch.float64).softmax(0).tolist()
    for i, gone in list(zip(alive, itertools.accumulate(mass)))[:-1]:
        kept[i] = gone > 1 - top_p
    return kept


def policy(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The distribution a rollout samples from, [..., v] of logits of the whole vocabulary."""
    scaled = logits.detach() / temperature
    rows = scaled.reshape(-1, scaled.size(-1))
    kept = [kept_tokens(row, top_k, top_p) for row in rows.tolist()]
    kept = torch.tensor(kept, device=rows.device).view(scaled.shape)
    return scaled.masked_fill(~kept, float("-inf")).softmax(-1)


@dataclasses.dataclass(frozen=True)
class ReferenceTerms:
    """Of every row [...]: what is trained, and the probability that a draft is accepted."""

    loss: torch.Tensor
    accepted: torch.Tensor


def reference_terms(
    logits: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    objective: str = "ce",
    weight: float = 1.0,
    sampling: tuple[float, int, float] = (1.0, 0, 1.0),
) -> ReferenceTerms:
    """One depth, by the definitions.

    Args:
        logits: [..., v] of the head.
        teacher: [..., v] of the policy, of the same predicted token.
        labels: int64 [...].
        objective: "ce", "kl", "tv", "ce+kl" or "ce+tv".
        weight: Of the second term of a sum.
        sampling: Temperature, top-k, top-p.
    """
    p = policy(teacher, *sampling)
    log_q = (logits / sampling[0]).log_softmax(-1)
    accepted = torch.minimum(p, log_q.exp()).sum(-1)
    cross_entropy = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    terms = dict(
        ce=cross_entropy.view_as(labels),
        kl=F.kl_div(log_q, p, reduction="none").sum(-1),
        tv=1 - accepted,
    )
    first, *second = objective.split("+")
    loss = terms[first]
    for name in second:
        loss = loss + weight * terms[name]
    return ReferenceTerms(loss, accepted.detach())


def reference_teacher_objective(
    logits_DSBV: Sequence[torch.Tensor], policy_SBV: torch.Tensor, batch: Batch, config: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The objective of a whole batch on one rank (mean over the targets of each depth).

    Args:
        logits_DSBV: Per depth, [s, b, v], float64.
        policy_SBV: The policy's, unshifted.
        batch: With labels and mask.
        config: The fields of the objective are read.

    Returns:
        The objective, and per depth the probability of acceptance [b, s].
    """
    depths = len(logits_DSBV)
    sampling = tuple(
        getattr(config, f"mtp_teacher_{name}") for name in ("temperature", "top_k", "top_p")
    )
    weights_D: Optional[Sequence[float]] = config.mtp_depth_weights
    total, chain_BS, found = torch.zeros((), dtype=torch.float64), 1.0, []
    for depth, logits_SBV in enumerate(logits_DSBV, start=1):
        labels_BS, mask_BS = reference_targets(batch, depth)
        ahead_BSV = torch.zeros_like(policy_SBV).transpose(0, 1)
        places = torch.arange(batch.labels.size(1)).expand_as(batch.labels) + 1
        places_BS, _ = reference_targets(dataclasses.replace(batch, labels=places), depth)
        for b, t in itertools.product(*map(range, places_BS.shape)):
            if places_BS[b, t]:
                ahead_BSV[b, t] = policy_SBV[places_BS[b, t] - 1, b].detach()
        terms = reference_terms(
            logits_SBV.transpose(0, 1), ahead_BSV, labels_BS,
            config.mtp_objective, config.mtp_objective_weight, sampling,
        )
        scale = config.mtp_loss_scaling_factor / depths
        if weights_D is not None:
            scale = scale * weights_D[depth - 1]
        rows_BS = torch.where(mask_BS != 0, terms.loss, 0.0) * mask_BS.double() * chain_BS
        total = total + scale * rows_BS.sum() / mask_BS.double().sum().clamp(min=1)
        found.append(terms.accepted.masked_fill(mask_BS == 0, 0))
        if config.mtp_depth_weighting == "chained":
            chain_BS = chain_BS * terms.accepted.masked_fill(mask_BS == 0, 1)
    return total, found
