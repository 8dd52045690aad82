"""Arms: what may differ between runs from one warm start, and the rollouts that they share.

Nothing here reaches the policy: arms differ in their heads, and heads are isolated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from examples.online_rl.record import FROZEN, ONLINE
from examples.online_rl.rollout import Rollouts


@dataclass(frozen=True)
class Arm:
    """One way to treat the heads during RL.

    Attributes:
        name: the `phase` of its records.
        trains_heads: whether the heads train; if not, the training forward runs no MTP.
        objective: fields of the model's config that say by what they train.
    """

    name: str
    trains_heads: bool = True
    objective: Mapping[str, Any] = field(default_factory=dict)


ONLINE_ARM, FROZEN_ARM = Arm(ONLINE), Arm(FROZEN, trains_heads=False)

OBJECTIVES: dict[str, dict[str, Any]] = {
    "ce": {"mtp_objective": "ce"},
    "kl": {"mtp_objective": "kl"},
    "tv": {"mtp_objective": "tv"},
    "ce+tv": {"mtp_objective": "ce+tv", "mtp_objective_weight": 1.0},
    "chained-kl": {"mtp_objective": "kl", "mtp_depth_weighting": "chained"},
    "chained-tv": {"mtp_objective": "tv", "mtp_depth_weighting": "chained"},
}


def objective_arms(names: Sequence[str], temperature: float) -> list[Arm]:
    """Return the frozen arm, then one per objective, all of which measure Σ min(p, q).

    Args:
        names: keys of `OBJECTIVES`.
        temperature: of the rollouts, hence of the policy as the heads' teacher.
    """
    common = {"mtp_expected_acceptance": True, "mtp_teacher_temperature": temperature}
    trained = [Arm(name, objective={**OBJECTIVES[name], **common}) for name in names]
    return [Arm(FROZEN, trains_heads=False, objective=common), *trained]


class SharedRollouts:
    """Samples once for all arms whose policy is the same bit for bit.

    Rollouts are a function of the policy's parameters, the step and the settings. An arm whose
    parameters are those that the step's rollouts were sampled from would sample the same again, so
    it is given them; any other arm samples its own.
    """

    def __init__(self) -> None:
        self.samples = 0  # how often an arm has sampled
        self._step: int | None = None
        self._rollouts: Rollouts | None = None
        self._policy: dict[str, Tensor] = {}

    def take(
        self, step: int, policy: Mapping[str, Tensor], sample: Callable[[], Rollouts]
    ) -> Rollouts:
        """Return the step's rollouts of `policy`; `sample` makes them if nobody has."""
        if self._step == step and same_tensors(policy, self._policy):
            return self._rollouts
        rollouts = sample()
        self.samples += 1
        if self._step != step:
            self._step, self._rollouts = step, rollouts
            self._policy = {name: value.detach().clone() for name, value in policy.items()}
        return rollouts


def same_tensors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether both have the same names and, under each, the same bytes."""
    return ours.keys() == theirs.keys() and all(
        same_bits(value, theirs[name]) for name, value in ours.items()
    )


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are equal byte for byte: -0.0 is not 0.0, a NaN is itself."""
    return torch.equal(*(value.detach().reshape(-1).view(torch.uint8) for value in (ours, theirs)))
