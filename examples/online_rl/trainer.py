"""The loop: a supervised warm start, then GRPO with the MTP heads trained in the same forward.

Shape suffixes: B samples, S tokens of a padded sequence.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from examples.online_rl.arms import ONLINE_ARM, Arm, SharedRollouts
from examples.online_rl.batch import TrainingBatch, share_from_first, sum_over
from examples.online_rl.grpo import group_normalised_advantages, policy_loss, supervised_loss
from examples.online_rl.judge import Judge
from examples.online_rl.model import ModelShape, build_model, policy_logits, split_parameters
from examples.online_rl.optimizers import Optimizers
from examples.online_rl.record import WARM_START, StepRecord, checksum
from examples.online_rl.rollout import RolloutEngine, Rollouts
from examples.online_rl.settings import Settings
from examples.online_rl.speculative import SpeculativeDecoder
from examples.online_rl.task import ChainSumTask, Problem, Score, Tokenizer, shows_working
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mtp_objective.metrics import mtp_metrics
from tests.support import device


class Trainer:
    """A policy with its heads, its rollout engine and its task.

    Args:
        settings: all numbers of the run.
        groups: process groups; every rank of `groups.cp` holds a part of each sequence.
        arm: how the heads are treated in GRPO, and by which objective they train at all.
    """

    def __init__(
        self, settings: Settings, groups: ProcessGroupCollection, arm: Arm = ONLINE_ARM
    ) -> None:
        self.settings = settings
        self.arm = arm
        self.tokenizer = Tokenizer()
        self.task = ChainSumTask(
            settings.terms,
            settings.working_share,
            settings.gap_share,
            settings.style_weight,
            settings.seed,
        )
        shape = ModelShape(
            hidden=settings.hidden,
            layers=settings.layers,
            attention_heads=settings.attention_heads,
            mtp_depths=settings.mtp_depths,
            vocab_size=self.tokenizer.vocab_size,
            max_length=self.task.max_length,
        )
        self.policy_model = build_model(shape, groups, settings.seed, arm.objective)
        self.policy, self.heads = split_parameters(self.policy_model)
        self._engine = RolloutEngine(shape, self.tokenizer, groups, settings.temperature)
        self._drafting = SpeculativeDecoder(
            self._engine.model, self.tokenizer, shape.max_length, settings.temperature
        )
        self.judge = Judge(self._engine, self._drafting, self.task, settings)
        self._cp_group = groups.cp
        self._length = shape.max_length
        self.optimizers: Optimizers | None = None

    def warm_start(self) -> Iterator[StepRecord]:
        """Learn from demonstrations, one record per step; the heads are isolated here, too."""
        s = self.settings
        self.optimizers = self._optimizers(s.warm_lr, s.warm_lr)
        for step in range(1, s.warm_steps + 1):
            began = time.perf_counter()
            pairs = self.task.demonstrations((step - 1) * s.warm_batch, s.warm_batch)
            batch = TrainingBatch.of(*self._pad(pairs), self._cp_group, pad=self.tokenizer.pad)
            logits = policy_logits(self.policy_model, batch, train_heads=True, isolated=True)
            loss = supervised_loss(
                logits, batch.labels_BS, batch.loss_mask_BS, batch.num_tokens
            )
            norms = self._update(loss, self._lr_factor(step, s.warm_steps))
            [mean_loss] = sum_over(self._cp_group, loss)
            yield StepRecord(
                s.seed,
                WARM_START,
                step,
                mean_loss,
                *norms,
                **self._take_estimate(),
                seconds=time.perf_counter() - began,
            )

    def reinforce(
        self, steps: int, shared: SharedRollouts | None = None
    ) -> Iterator[StepRecord]:
        """Run `steps` GRPO steps with fresh optimizers, one record per step.

        Everything but the heads is a function of the policy's parameters and the settings: two
        runs from one warm start differ only if the MTP objective reaches the policy. Rollouts are
        plain: speculative ones have the same distribution, but the tokens depend on the drafts.

        Args:
            steps: how many.
            shared: takes rollouts from an arm with the same policy; None: samples all.
        """
        shared = shared or SharedRollouts()
        s = self.settings
        self.optimizers = self._optimizers(s.policy_lr, s.heads_lr)
        start = {name: value.detach().clone() for name, value in self.policy.items()}
        for step in range(1, steps + 1):
            began = time.perf_counter()
            problems = self.task.problems((step - 1) * s.prompts, s.prompts)
            problems = [problem for problem in problems for _ in range(s.samples)]
            rollouts = shared.take(step, self.policy, lambda: self._sample(problems, step))
            measures = step == 1 or step == steps or step % s.measure_every == 0
            measured = self.judge.measure(self.policy_model) if measures else {}
            texts = rollouts.completions(self.tokenizer)
            scores = [self.task.score(*pair) for pair in zip(problems, texts)]
            rewards_B = torch.tensor([score.reward for score in scores], device=device())
            update = self._reinforce_once(rollouts, rewards_B, step, measures)
            yield StepRecord(
                s.seed,
                self.arm.name,
                step,
                **update,
                **measured,
                **_means(scores),
                working=sum(map(shows_working, texts)) / len(texts),
                samples_crc=checksum(rollouts.tokens_BS),
                rewards_crc=checksum(rewards_B),
                policy_change=_relative_change(start, self.policy),
                example=f"{problems[0].prompt} → {texts[0]}",
                seconds=time.perf_counter() - began,
            )

    def parameters(self) -> dict[str, Tensor]:
        """Return copies of all parameters, the heads' included."""
        return {name: p.detach().clone() for name, p in {**self.policy, **self.heads}.items()}

    @torch.no_grad()
    def restore(self, parameters: dict[str, Tensor]) -> None:
        """Set all parameters to what `parameters()` returned."""
        for name, parameter in {**self.policy, **self.heads}.items():
            parameter.copy_(parameters[name])

    def _reinforce_once(
        self,
        rollouts: Rollouts,
        rewards_B: Tensor,
        step: int,
        measures: bool,
    ) -> dict[str, Any]:
        s = self.settings
        batch = TrainingBatch.of(
            rollouts.tokens_BS,
            rollouts.token_mask_BS,
            self._cp_group,
            rollouts.log_probs_BS,
            pad=self.tokenizer.pad,
        )
        if measures and not self.arm.trains_heads:  # a forward of its own, for the estimate alone
            policy_logits(self.policy_model, batch, train_heads=True, isolated=True)
        logits = policy_logits(self.policy_model, batch, self.arm.trains_heads, s.isolated)
        result = policy_loss(
            logits / s.temperature,
            batch.labels_BS,
            batch.loss_mask_BS,
            batch.old_log_probs_BS,
            group_normalised_advantages(rewards_B, s.samples),
            batch.num_tokens,
            s.clip,
        )
        norms = self._update(result.loss, self._lr_factor(step, s.steps))
        loss, entropy, clipped = sum_over(
            self._cp_group, result.loss, result.entropy_sum, result.clipped
        )
        tokens = float(batch.num_tokens)
        return dict(
            loss=loss,
            policy_grad_norm=norms[0],
            heads_grad_norm=norms[1],
            **self._take_estimate(),
            tokens_per_sample=tokens / len(rewards_B),
            entropy=entropy / tokens,
            clipped=clipped / tokens,
        )

    def _update(self, loss: Tensor, lr_factor: float) -> tuple[float, float]:
        # Gradients are averaged over the ranks that share a sequence, as the MTP objective
        # expects; the loss is this rank's part of a sum, hence the factor.
        self.optimizers.zero_grad()
        (loss * self._cp_group.size()).backward()
        return self.optimizers.step(lr_factor)

    def _take_estimate(self) -> dict[str, Any]:
        """Return what the model's own metrics say since the last call, {} if no head ran."""
        metrics = mtp_metrics(self.policy_model)
        if not metrics.supervised_tokens[0]:
            return {}
        estimate = dict(
            mtp_loss=metrics.losses,
            mtp_acceptance=metrics.acceptance,
            estimated_length=metrics.accepted_length,
        )
        if self.arm.objective.get("mtp_expected_acceptance"):
            estimate |= dict(
                mtp_expected_acceptance=metrics.expected_acceptance,
                expected_length=metrics.expected_accepted_length,
            )
        return estimate

    def _sample(self, problems: list[Problem], step: int) -> Rollouts:
        self._engine.load_weights(self.policy_model)
        generator = torch.Generator(device()).manual_seed(self.settings.seed * 1_000_003 + step)
        rollouts = self._engine.sample([problem.prompt for problem in problems], generator)
        share_from_first(
            self._cp_group, rollouts.tokens_BS, rollouts.token_mask_BS, rollouts.log_probs_BS
        )
        return rollouts

    def _pad(self, pairs: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        shape = (len(pairs), self._length)
        tokens_BS = torch.full(shape, self.tokenizer.pad, dtype=torch.long)
        mask_BS = torch.zeros(shape, dtype=torch.bool)
        for row, (prompt, completion) in enumerate(pairs):
            ids = self.tokenizer.encode(prompt + completion)
            tokens_BS[row, : len(ids)] = torch.tensor(ids)
            mask_BS[row, len(prompt) : len(ids)] = True
        return tokens_BS.to(device()), mask_BS.to(device())

    def _optimizers(self, policy_lr: float, heads_lr: float) -> Optimizers:
        limit = self.settings.max_grad_norm
        return Optimizers(self.policy, self.heads, policy_lr, heads_lr, limit, self._cp_group)

    def _lr_factor(self, step: int, total: int) -> float:
        """Rise over `ramp_steps`, fall linearly to a tenth at step `total`."""
        return min(1.0, step / self.settings.ramp_steps) * (1.0 - 0.9 * (step - 1) / total)


def _means(scores: list[Score]) -> dict[str, float]:
    names = ("reward", "right", "spaced")
    return {name: sum(getattr(s, name) for s in scores) / len(scores) for name in names}


def _relative_change(start: dict[str, Tensor], now: dict[str, torch.nn.Parameter]) -> float:
    with torch.no_grad():
        moved = sum((now[name] - value).square().sum() for name, value in start.items())
        size = sum(value.square().sum() for value in start.values())
    return float((moved / size).sqrt())
