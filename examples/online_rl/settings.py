"""What a run does: one frozen object, two presets and the refusal of what cannot work."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """All numbers of a run.

    Attributes:
        steps: GRPO steps.
        warm_steps: supervised steps before them.
        measure_every: GRPO steps between two measurements of the accepted length.
        measure_prompts: held-out problems that are answered for one.
        isolated: whether the MTP objective is kept away from the policy.
        context_parallel_size: ranks that share each sequence.
        seed: of the weights, the problems and the sampling.
        temperature: of the rollouts and of the policy loss on them.
        terms: numbers in a sum.
        working_share: share of the demonstrations that show running totals.
        gap_share: share of the gaps in that working that have a space.
        style_weight: part of the reward that a right answer earns by its spaces.
        hidden, layers, attention_heads, mtp_depths: the policy's dimensions.
        warm_batch, warm_lr: demonstrations per supervised step, peak learning rate.
        prompts, samples: problems per GRPO step, samples of each.
        policy_lr, heads_lr: learning rates in GRPO.
        clip: half-width of the trusted range of the probability ratio.
        max_grad_norm: of the policy and of the heads, each on its own.
        ramp_steps: steps over which a learning rate rises.
    """

    steps: int
    warm_steps: int
    measure_every: int = 5
    measure_prompts: int = 64
    isolated: bool = True
    context_parallel_size: int = 1
    seed: int = 1
    temperature: float = 1.0
    terms: int = 3
    working_share: float = 0.5
    gap_share: float = 0.25
    style_weight: float = 0.5
    hidden: int = 64
    layers: int = 2
    attention_heads: int = 4
    mtp_depths: int = 2
    warm_batch: int = 96
    warm_lr: float = 4e-3
    prompts: int = 32
    samples: int = 8
    policy_lr: float = 2.5e-4
    heads_lr: float = 2e-3
    clip: float = 0.2
    max_grad_norm: float = 1.0
    ramp_steps: int = 20

    def __post_init__(self) -> None:
        """Refuse numbers that no run can use; raises ValueError."""
        counts = ("steps", "warm_steps", "warm_batch", "prompts", "context_parallel_size")
        for name in (*counts, "measure_every", "measure_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2 to form a group, got {self.samples}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if not 0.0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be above 0 and finite, got {self.temperature}")


PRESETS: dict[str, Settings] = {
    "demo": Settings(steps=150, warm_steps=600),
    "tiny": Settings(
        steps=4,
        warm_steps=30,
        measure_every=2,
        measure_prompts=16,
        terms=2,
        working_share=0.2,
        hidden=32,
        warm_batch=32,
        prompts=8,
        samples=8,
        ramp_steps=5,
    ),
}
