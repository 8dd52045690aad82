"""What one step reports: a line of the metrics file."""

import zlib
from dataclasses import dataclass, field

from torch import Tensor

WARM_START, ONLINE, FROZEN = "warm_start", "online", "frozen"


@dataclass(frozen=True)
class StepRecord:
    """One supervised or GRPO step; None and [] where the step has no such number.

    Attributes:
        seed: of the run.
        phase: "warm_start", or the arm: "online" (heads trained) or "frozen" (heads left alone,
            and no MTP in the training forward).
        step: from 1.
        loss: mean cross-entropy in the warm start, else the clipped policy loss.
        policy_grad_norm, heads_grad_norm: before clipping.
        mtp_loss, mtp_acceptance: per depth; frozen heads have them where they are measured.
        estimated_length: the trainer's estimate of the accepted length, 1 to 1 + depths, from
            that forward on the sampled tokens (`accepted_length` of `mtp_metrics`).
        mtp_expected_acceptance, expected_length: Σ min(p, q) per depth and chained, from that
            forward, where the model's config asks for them.
        measured_length, measured_length_greedy: tokens per step of the speculative decoder with
            the step's policy and heads on held-out problems, sampling and greedily.
        reward, right, spaced, working: means over the samples: the reward, the share of right
            answers, the share of spaced gaps, the share that writes running totals.
        tokens_per_sample: sampled tokens.
        entropy: of the policy, mean over sampled tokens.
        clipped: share of sampled tokens whose probability ratio was clipped.
        samples_crc, rewards_crc: checksums of the sampled tokens and of the rewards.
        policy_change: distance of the policy's parameters from the warm start over their norm.
        example: the first sample, prompt and completion.
        seconds: wall clock of the step, measuring included.
    """

    seed: int
    phase: str
    step: int
    loss: float
    policy_grad_norm: float
    heads_grad_norm: float
    mtp_loss: list[float] = field(default_factory=list)
    mtp_acceptance: list[float] = field(default_factory=list)
    estimated_length: float | None = None
    mtp_expected_acceptance: list[float] = field(default_factory=list)
    expected_length: float | None = None
    measured_length: float | None = None
    measured_length_greedy: float | None = None
    reward: float | None = None
    right: float | None = None
    spaced: float | None = None
    working: float | None = None
    tokens_per_sample: float | None = None
    entropy: float | None = None
    clipped: float | None = None
    samples_crc: int | None = None
    rewards_crc: int | None = None
    policy_change: float | None = None
    example: str | None = None
    seconds: float = 0.0


def checksum(values: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    return zlib.crc32(values.cpu().numpy().tobytes())
