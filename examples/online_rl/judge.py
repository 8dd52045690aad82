"""The judge: held-out problems answered with the heads drafting, and counted."""

from dataclasses import asdict
from typing import Any

import torch

from examples.online_rl.acceptance import Check, check, score
from examples.online_rl.rollout import RolloutEngine
from examples.online_rl.settings import Settings
from examples.online_rl.speculative import SpeculativeDecoder, SpeculativeRollouts
from examples.online_rl.task import ChainSumTask
from megatron.core.models.gpt import GPTModel
from tests.support import device

Checks = dict[str, list[Check]]  # by "sampling" and "greedy"


class Judge:
    """Measures accepted lengths; every measurement draws the same random numbers.

    Args:
        engine: whose model takes the weights; the next rollouts must load theirs again.
        drafting: the speculative decoder of that model.
        task: gives the problems.
        settings: says how many, the seed and the temperature.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        drafting: SpeculativeDecoder,
        task: ChainSumTask,
        settings: Settings,
    ) -> None:
        self._engine, self._drafting = engine, drafting
        self._task, self._settings = task, settings

    def measure(self, policy: GPTModel) -> dict[str, float | None]:
        """Return the accepted lengths as the fields of a `StepRecord`."""
        self._engine.load_weights(policy)
        count = self._settings.measure_prompts
        return dict(
            measured_length=self._answer(count, greedy=False).accepted_length,
            measured_length_greedy=self._answer(count, greedy=True).accepted_length,
        )

    def check(self, policy: GPTModel, count: int) -> Checks:
        """Compare what the decoder accepts on `count` problems with what training expects."""
        self._engine.load_weights(policy)
        checks = {}
        for name, greedy in (("sampling", False), ("greedy", True)):
            text = self._answer(count, greedy)
            scores = score(self._engine.model, text, self._settings.temperature, greedy)
            checks[name] = check(text, scores)
        return checks

    def _answer(self, count: int, greedy: bool) -> SpeculativeRollouts:
        prompts = [problem.prompt for problem in self._task.held_out(count)]
        generator = torch.Generator(device()).manual_seed(self._settings.seed)
        return self._drafting.sample(prompts, generator, greedy)


def plain(checks: dict[str, Checks]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the checks of several arms as JSON has them, with their verdicts."""
    return {
        arm: {
            way: [{**asdict(one), "agrees": one.agrees} for one in found]
            for way, found in ways.items()
        }
        for arm, ways in checks.items()
    }
