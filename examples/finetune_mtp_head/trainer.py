"""One optimizer step, and everything that belongs to one."""

import math
import time
from dataclasses import dataclass, field, replace

import torch

from examples.finetune_mtp_head.batch import Batch, count_targets
from examples.finetune_mtp_head.conversations import Sample
from examples.finetune_mtp_head.evaluation import Evaluation, evaluate
from examples.finetune_mtp_head.head import TrainableHead
from examples.finetune_mtp_head.objective import Objective
from examples.finetune_mtp_head.sampler import Sampler, SeenSamples
from examples.finetune_mtp_head.settings import Settings
from examples.finetune_mtp_head.target import FrozenTarget
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mtp_objective.metrics import MetricSums, MTPMetrics
from tools.mtp_checkpoint.native.layer import NativeHead


@dataclass(frozen=True)
class Corpus:
    """Training and held-out samples, the same on every rank."""

    train: list[Sample]
    held_out: list[Sample]
    pad_token: int


@dataclass(frozen=True)
class StepRecord:
    """What one step reports; the same on every rank.

    Attributes:
        loss: mean cross-entropy over the step's targets, before the update; with several depths,
            the mean of theirs.
        accuracy: share of the first depth's targets that are its first choice.
        grad_norm: before clipping.
        lr: used by this step.
        targets: predictions of the first depth that counted, over all ranks.
        samples: over all ranks.
        seconds: wall clock.
        per_depth: with several depths, ``depth_1_loss``, ``depth_1_accuracy`` and so on.
    """

    loss: float
    accuracy: float
    grad_norm: float
    lr: float
    targets: int
    samples: int
    seconds: float
    per_depth: dict[str, float] = field(default_factory=dict)


class Trainer:
    """A head in training beside its frozen target.

    Args:
        settings: of the run.
        groups: process groups of this rank.
        target: the frozen model.
        head: loaded.
        corpus: samples.
    """

    def __init__(
        self,
        settings: Settings,
        groups: ProcessGroupCollection,
        target: FrozenTarget,
        head: NativeHead,
        corpus: Corpus,
    ) -> None:
        self.settings, self.groups, self.corpus = settings, groups, corpus
        # Ranks of an expert-parallel group see the same samples, or all ranks different ones.
        shared = settings.same_batch_per_ep_group
        data = groups.expt_dp if shared else groups.dp
        self.sampler, self._held_out = (
            Sampler(
                len(samples),
                settings.batch_size,
                settings.micro_batch_size,
                data.rank(),
                data.size(),
                settings.seed,
            )
            for samples in (corpus.train, corpus.held_out)
        )
        self.seen = SeenSamples(len(corpus.train), groups.dp.size() // data.size(), groups.dp)
        self.total_steps = settings.epochs * self.sampler.steps_per_epoch
        self.head = TrainableHead(head, settings, groups, self.total_steps)
        layer = head.mtp.layers[0]
        self.objective = Objective(
            head.config.transformer, target, layer, groups, head.config.transformer.params_dtype
        )
        self.depths, self.steps_done = head.served.depths, 0

    @property
    def target(self) -> FrozenTarget:
        """The frozen model."""
        return self.objective.target

    def step(self) -> StepRecord:
        """Run the next step.

        Raises:
            FinetuneError: a proof of the hidden states failed, a gradient is not finite, or the
                epoch that ends here has not seen each sample exactly once.
        """
        began = time.perf_counter()
        step = self.steps_done + 1
        metrics = self.gradients(step)
        update = self.head.update()
        self.steps_done = step
        if self.sampler.ends_epoch(step):
            self.seen.finish_epoch()
        return StepRecord(
            loss=mean_loss(metrics),
            accuracy=metrics.acceptance[0],
            grad_norm=update.grad_norm,
            lr=update.lr,
            targets=metrics.supervised_tokens[0] // self.copies,
            samples=len(self.sampler.batch(step)),
            seconds=time.perf_counter() - began,
            per_depth=_per_depth(metrics),
        )

    @property
    def copies(self) -> int:
        """Ranks that see each sample."""
        return self.seen.copies

    def gradients(self, step: int) -> MTPMetrics:
        """Leave the reduced gradients of a step (from 1) in place; return its loss and hits.

        The objective is the mean over the depths of Σ CE / n over a depth's targets in all
        microbatches of all ranks, n their number: how samples are split over microbatches and
        ranks does not change what it means. Where several ranks see one sample, both sums count
        it as often.
        """
        parts, batches = self.sampler.microbatches(step), self.batches(step)
        group = self.groups.dp
        targets = count_targets(batches, group).clamp(min=1)
        sums = MetricSums(num_depths=self.depths)
        self.head.zero_grad()
        for part, batch in zip(parts, batches):
            hidden_BSH = self.target.hidden(batch.tokens_BS)
            # DDP multiplies every gradient by 1 / (data-parallel size).
            self.objective.backward(
                self.head.ddp, batch, hidden_BSH, targets / group.size(), sums
            )
            self.seen.add(part)
        self.head.reduce_gradients()
        torch.distributed.all_reduce(sums.sums, group=group)
        return MTPMetrics(sums.sums)

    def batches(self, step: int) -> list[Batch]:
        """This rank's microbatches of a step (from 1)."""
        parts = self.sampler.microbatches(step)
        return [self._batch(part, self.corpus.train) for part in parts]

    def evaluate(self) -> Evaluation:
        """Loss and acceptance on the held-out samples."""
        parts = self._held_out.spread(list(range(len(self.corpus.held_out))))
        batches = (self._batch(part, self.corpus.held_out) for part in parts)
        found = evaluate(self.head.ddp, self.objective, batches, self.groups.dp)
        return replace(found, targets=found.targets // self.copies)

    def _batch(self, part: list[int], samples: list[Sample]) -> Batch:
        chosen = [samples[index] for index in part]
        return Batch.of(chosen, self.corpus.pad_token, self.depths)


def mean_loss(metrics: MTPMetrics) -> float:
    """What a step minimises: the mean over the depths that have targets."""
    losses = [loss for loss, n in zip(metrics.losses, metrics.supervised_tokens) if n]
    return sum(losses) / len(losses) if losses else math.nan


def _per_depth(metrics: MTPMetrics) -> dict[str, float]:
    if metrics.num_depths == 1:
        return {}
    named = (("loss", metrics.losses), ("accuracy", metrics.acceptance))
    return {
        f"depth_{depth}_{name}": value
        for name, values in named
        for depth, value in enumerate(values, 1)
    }
