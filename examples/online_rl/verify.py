"""The isolation proof: the same run without MTP must give the same policy, bit for bit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.online_rl.arms import same_bits
from examples.online_rl.record import StepRecord
from examples.online_rl.trainer import Trainer


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after some steps; all tensors are copies.

    Attributes:
        policy, heads: parameters by name.
        optimizer: the policy's Adam state, by parameter and field.
        samples, rewards: checksums of the sampled tokens and of the rewards, of each step so far.
    """

    policy: dict[str, Tensor]
    heads: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    samples: list[int]
    rewards: list[int]

    @classmethod
    def of(cls, trainer: Trainer, records: list[StepRecord]) -> "Snapshot":
        """Copy the trainer's present state; `records` are the steps that led to it."""
        return cls(
            policy={name: p.detach().clone() for name, p in trainer.policy.items()},
            heads={name: p.detach().clone() for name, p in trainer.heads.items()},
            optimizer=trainer.optimizers.policy_state(),
            samples=[record.samples_crc for record in records],
            rewards=[record.rewards_crc for record in records],
        )


@dataclass(frozen=True)
class IsolationReport:
    """What the comparison found; `passed` only if nothing differs and all was in motion.

    Attributes:
        steps: GRPO steps that both runs made.
        parameters, optimizer_tensors: how many tensors were compared.
        different: names of the policy's parameters and Adam tensors that are not equal.
        largest_difference: largest absolute difference of a policy parameter.
        same_samples: whether both runs sampled the same tokens in every step.
        same_rewards: whether both earned the same rewards in every step.
        idle: parameters, the heads' included, that the run with MTP left as they were.
    """

    steps: int
    parameters: int
    optimizer_tensors: int
    different: list[str]
    largest_difference: float
    same_samples: bool
    same_rewards: bool
    idle: list[str]

    @property
    def passed(self) -> bool:
        """Whether the policy is the same bit for bit although heads and policy were trained."""
        same = not self.different and self.same_samples and self.same_rewards
        return same and not self.idle

    def describe(self) -> str:
        """Return one sentence for the terminal."""
        compared = (
            f"{self.parameters} parameters of the policy and {self.optimizer_tensors} tensors of "
            f"their Adam state, after {self.steps} GRPO steps with and without MTP"
        )
        if self.different:
            return (
                f"of {compared}, {len(self.different)} differ (first: {self.different[0]}; "
                f"parameters by up to {self.largest_difference:.3g})"
            )
        if not self.same_samples:
            return f"{compared}, are equal, but the sampled tokens on the way differ"
        if not self.same_rewards:
            return f"{compared}, are equal, but the rewards on the way differ"
        if self.idle:
            return (
                f"nothing was proved: {len(self.idle)} parameters never moved "
                f"(first: {self.idle[0]})"
            )
        return (
            f"{compared}, are the same bit for bit, "
            "and so are every sampled token and every reward"
        )


def compare(with_mtp: Snapshot, without_mtp: Snapshot, start: dict[str, Tensor]) -> IsolationReport:
    """Compare two runs from one warm start.

    Args:
        with_mtp: state of the run that trained the heads.
        without_mtp: state of the run that did not, after as many steps.
        start: all parameters after the warm start.

    Raises:
        ValueError: the runs made different numbers of steps, or have different tensors.
    """
    if len(with_mtp.samples) != len(without_mtp.samples):
        raise ValueError(
            f"cannot compare {len(with_mtp.samples)} steps with {len(without_mtp.samples)}"
        )
    different = _different(with_mtp.policy, without_mtp.policy)
    different += _different(with_mtp.optimizer, without_mtp.optimizer)
    largest = max(
        float((value - without_mtp.policy[name]).abs().max())
        for name, value in with_mtp.policy.items()
    )
    moved = {**with_mtp.policy, **with_mtp.heads}
    return IsolationReport(
        steps=len(with_mtp.samples),
        parameters=len(with_mtp.policy),
        optimizer_tensors=len(with_mtp.optimizer),
        different=different,
        largest_difference=largest,
        same_samples=with_mtp.samples == without_mtp.samples,
        same_rewards=with_mtp.rewards == without_mtp.rewards,
        idle=[name for name, value in moved.items() if torch.equal(value, start[name])],
    )


def _different(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    if ours.keys() != theirs.keys():
        raise ValueError(f"only in one of the runs: {sorted(ours.keys() ^ theirs.keys())}")
    return [name for name in ours if not same_bits(ours[name], theirs[name])]

