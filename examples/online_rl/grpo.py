"""GRPO outside the model: group-normalised advantages and a clipped policy loss from logits.

Shape suffixes: P prompts, G samples of one prompt, B = P·G samples, S local positions,
V vocabulary.
Labels and masks are prediction-aligned: position t holds the target of the logits at t.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """A loss to call `backward()` on, and local sums for the report.

    Attributes:
        loss: scalar; its sum over the ranks that share the sequences is the mean over all tokens.
        entropy_sum: scalar, no gradient, sum of the policy's entropy over the local tokens.
        clipped: scalar, no gradient, local tokens whose ratio was clipped.
    """

    loss: Tensor
    entropy_sum: Tensor
    clipped: Tensor


def group_normalised_advantages(rewards_B: Tensor, group_size: int) -> Tensor:
    """Return (reward - mean) / (standard deviation + 1e-4), both over the samples of one prompt.

    A group of equal rewards has advantage 0. Example, group_size 2:
    [1, 0, 1, 1] gives [0.7070, -0.7070, 0, 0].

    Raises:
        ValueError: the rewards do not split into groups of at least 2.
    """
    if group_size < 2 or rewards_B.numel() % group_size:
        raise ValueError(
            f"expected whole groups of at least 2 samples, got {rewards_B.numel()} rewards "
            f"in groups of {group_size}"
        )
    rewards_PG = rewards_B.view(-1, group_size)
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return (centred_PG / (rewards_PG.std(dim=1, keepdim=True) + 1e-4)).view(-1)


def token_log_probs(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return float32 [b, s], the log-probability of each label; labels of -100 count as id 0."""
    log_probs_BSV = torch.log_softmax(logits_BSV.float(), dim=-1)
    return log_probs_BSV.gather(-1, labels_BS.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def supervised_loss(
    logits_BSV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor, num_tokens: Tensor
) -> Tensor:
    """Return the local part of the mean cross-entropy, for the warm start; see `policy_loss`."""
    return -(token_log_probs(logits_BSV, labels_BS) * loss_mask_BS).sum() / num_tokens


def policy_loss(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    loss_mask_BS: Tensor,
    old_log_probs_BS: Tensor,
    advantages_B: Tensor,
    num_tokens: Tensor,
    clip: float,
) -> PolicyLoss:
    """Return the clipped surrogate, -min(r·A, clamp(r, 1±clip)·A), averaged over sampled tokens.

    Args:
        logits_BSV: what the model returned.
        labels_BS: int64, -100 where there is no target.
        loss_mask_BS: 1 on the sampled tokens.
        old_log_probs_BS: log-probabilities of the labels when they were sampled.
        advantages_B: one per sample.
        num_tokens: sampled tokens of the whole batch, over all ranks.
        clip: half-width of the trusted range of the ratio r = exp(new - old).
    """
    log_probs_BS = token_log_probs(logits_BSV, labels_BS)
    ratio_BS = torch.exp((log_probs_BS - old_log_probs_BS) * loss_mask_BS)
    advantage_B1 = advantages_B.unsqueeze(1)
    plain_BS = ratio_BS * advantage_B1
    trusted_BS = ratio_BS.clamp(1.0 - clip, 1.0 + clip) * advantage_B1
    loss = -(torch.minimum(plain_BS, trusted_BS) * loss_mask_BS).sum() / num_tokens
    with torch.no_grad():
        p_BSV = torch.softmax(logits_BSV.float(), dim=-1)
        entropy_BS = -(p_BSV * torch.log_softmax(logits_BSV.float(), dim=-1)).sum(-1)
        clipped = ((trusted_BS < plain_BS) * loss_mask_BS).sum()
    return PolicyLoss(loss, (entropy_BS * loss_mask_BS).sum(), clipped)
