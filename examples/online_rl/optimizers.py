"""Two Adams, one for the policy and one for the heads: what one does, the other cannot see."""

import torch
from torch import Tensor

from examples.online_rl.batch import average_gradients


class Optimizers:
    """Separate state, learning rates and gradient clipping for the policy and for the heads.

    Args:
        policy, heads: parameters by name.
        policy_lr, heads_lr: learning rates; `step` multiplies both.
        max_grad_norm: of the policy and of the heads, each on its own.
        cp_group: ranks to average gradients over.
    """

    def __init__(
        self,
        policy: dict[str, torch.nn.Parameter],
        heads: dict[str, torch.nn.Parameter],
        policy_lr: float,
        heads_lr: float,
        max_grad_norm: float,
        cp_group: torch.distributed.ProcessGroup,
    ) -> None:
        self._policy, self._heads = policy, heads
        self._lr = (policy_lr, heads_lr)
        self._adam = [
            torch.optim.Adam(parameters.values(), lr=lr, betas=(0.9, 0.99))
            for parameters, lr in zip((policy, heads), self._lr)
        ]
        self._max_grad_norm = max_grad_norm
        self._cp_group = cp_group

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for adam in self._adam:
            adam.zero_grad(set_to_none=True)

    def step(self, lr_factor: float) -> tuple[float, float]:
        """Average, clip and apply the gradients; return the (policy, heads) norms before clipping.

        Parameters without a gradient stay as they are, so heads that did not run do not move.
        """
        norms = []
        for adam, lr, named in zip(self._adam, self._lr, (self._policy, self._heads)):
            parameters = list(named.values())
            average_gradients(parameters, self._cp_group)
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)))
            adam.param_groups[0]["lr"] = lr * lr_factor
            adam.step()
        return norms[0], norms[1]

    def policy_state(self) -> dict[str, Tensor]:
        """Return copies of the policy's optimizer state, by parameter and field."""
        state = self._adam[0].state
        return {
            f"{name}/{field}": value.detach().clone()
            for name, parameter in self._policy.items()
            for field, value in state[parameter].items()
        }
