"""The isolation proof: the same run without MTP must give the same policy, bit for bit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.online_rl.trainer import StepRecord, Trainer


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after some steps; all tensors are copies.

    Attributes:
        policy, heads: parameters by name.
        optimizer: the policy's Adam state, by parameter and field.
        rewards: mean reward of each step so far.
    """

    policy: dict[str, Tensor]
    heads: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rewards: list[float]

    @classmethod
    def of(cls, trainer: Trainer, records: list[StepRecord]) -> "Snapshot":
        """Copy the trainer's present state; `records` are the steps that led to it."""
        return cls(
            policy={name: p.detach().clone() for name, p in trainer.policy.items()},
            heads={name: p.detach().clone() for name, p in trainer.heads.items()},
            optimizer=trainer.optimizers.policy_state(),
            rewards=[record.reward for record in records],
        )


@dataclass(frozen=True)
class IsolationReport:
    """What the comparison found; `passed` only if nothing differs and every head moved.

    Attributes:
        steps: GRPO steps that both runs made.
        parameters, optimizer_tensors: how many tensors were compared.
        different: names of the policy's parameters and Adam tensors that are not equal.
        largest_difference: largest absolute difference of a policy parameter.
        rewards_equal: whether every step's reward is the same.
        idle_heads: head parameters that the run with MTP left as they were: nothing was proved.
    """

    steps: int
    parameters: int
    optimizer_tensors: int
    different: list[str]
    largest_difference: float
    rewards_equal: bool
    idle_heads: list[str]

    @property
    def passed(self) -> bool:
        """Whether the policy is the same bit for bit although the heads were trained."""
        return not self.different and self.rewards_equal and not self.idle_heads

    def describe(self) -> str:
        """Return one sentence for the terminal."""
        compared = (
            f"{self.parameters} policy tensors and {self.optimizer_tensors} of their Adam tensors "
            f"after {self.steps} GRPO steps"
        )
        if self.passed:
            return f"{compared} are bit for bit those of the run without MTP"
        if self.different:
            return (
                f"{len(self.different)} of {compared} differ from the run without MTP "
                f"(first: {self.different[0]}; parameters by up to {self.largest_difference:.3g})"
            )
        if not self.rewards_equal:
            return f"{compared} are equal, but the rewards on the way differ"
        return f"nothing was proved: MTP left {len(self.idle_heads)} head tensors unchanged"


def compare(
    with_mtp: Snapshot, without_mtp: Snapshot, heads_before: dict[str, Tensor]
) -> IsolationReport:
    """Compare two runs from one warm start.

    Args:
        with_mtp: state of the run that trained the heads.
        without_mtp: state of the run that did not, after as many steps.
        heads_before: the heads after the warm start.

    Raises:
        ValueError: the runs made different numbers of steps, or have different tensors.
    """
    if len(with_mtp.rewards) != len(without_mtp.rewards):
        raise ValueError(
            f"cannot compare {len(with_mtp.rewards)} steps with {len(without_mtp.rewards)}"
        )
    different = _different(with_mtp.policy, without_mtp.policy)
    different += _different(with_mtp.optimizer, without_mtp.optimizer)
    largest = max(
        float((value - without_mtp.policy[name]).abs().max())
        for name, value in with_mtp.policy.items()
    )
    return IsolationReport(
        steps=len(with_mtp.rewards),
        parameters=len(with_mtp.policy),
        optimizer_tensors=len(with_mtp.optimizer),
        different=different,
        largest_difference=largest,
        rewards_equal=with_mtp.rewards == without_mtp.rewards,
        idle_heads=[
            name for name, value in with_mtp.heads.items() if torch.equal(value, heads_before[name])
        ],
    )


def _different(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    if ours.keys() != theirs.keys():
        raise ValueError(f"only in one of the runs: {sorted(ours.keys() ^ theirs.keys())}")
    return [name for name in ours if not _same_bits(ours[name], theirs[name])]


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are equal byte for byte: -0.0 is not 0.0, a NaN is itself."""
    return torch.equal(*(value.reshape(-1).view(torch.uint8) for value in (ours, theirs)))
