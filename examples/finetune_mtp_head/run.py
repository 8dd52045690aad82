"""One rank of a run, from loading to the last checkpoint."""

import math
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from examples.finetune_mtp_head import checkpoints
from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.evaluation import Evaluation
from examples.finetune_mtp_head.loading import (
    LoadedHead,
    fingerprint,
    load_corpus,
    load_trainable,
)
from examples.finetune_mtp_head.preflight import preflight
from examples.finetune_mtp_head.report import PLOT, Report
from examples.finetune_mtp_head.settings import Settings
from examples.finetune_mtp_head.target import FrozenTarget
from examples.finetune_mtp_head.trainer import StepRecord, Trainer
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.support import device
from tools.mtp_checkpoint.source import HFDirectory


def prepared(
    settings: Settings, groups: ProcessGroupCollection, checkpoint: Path | None = None
) -> tuple[Trainer, LoadedHead, str]:
    """Load everything; return trainer, head and the data's checksum.

    Args:
        settings: of the run.
        groups: process groups of this rank.
        checkpoint: of this run, to continue from.

    Raises:
        FinetuneError, tools.mtp_checkpoint.errors.CheckpointError: bad input.
    """
    if checkpoint is not None:
        settings.check_continues(checkpoints.read_training(checkpoint)["settings"])
    directory = HFDirectory.open(settings.model)  # says more of a damaged one than transformers
    head_from = settings.head if checkpoint is None else checkpoint / checkpoints.HEAD
    target = FrozenTarget.load(settings.model, device())
    corpus = load_corpus(settings, groups.dp, target.vocabulary)
    loaded = load_trainable(settings, groups, directory, head_from)
    trainer = Trainer(settings, groups, target, loaded.head, corpus)
    checksum = fingerprint(corpus)
    if checkpoint is not None:
        checkpoints.restore(trainer, checkpoint, checksum)
    return trainer, loaded, checksum


def run_preflight(settings: Settings, groups: ProcessGroupCollection) -> bool:
    """Print the check list on the first rank; return whether all passed."""
    trainer, loaded, _ = prepared(settings, groups)
    checks = preflight(trainer, loaded)
    if dist.get_rank() == 0:
        print("\n".join(map(str, checks)), flush=True)
    return all(check.passed for check in checks)


def run(settings: Settings, groups: ProcessGroupCollection, resume: bool) -> Path:
    """Fine-tune; return the last checkpoint.

    Args:
        settings: of the run.
        groups: process groups of this rank.
        resume: continue from the newest checkpoint in the output folder.
    """
    checkpoint = checkpoints.latest(settings.output) if resume else None
    trainer, loaded, checksum = prepared(settings, groups, checkpoint)
    is_first = dist.get_rank() == 0
    report = Report(settings.output, is_first, trainer.total_steps, trainer.steps_done)
    report.say(_summary(trainer))
    last = checkpoint
    if not resume:
        _evaluate(trainer, report)
    try:
        while trainer.steps_done < trainer.total_steps:
            report.add("train", trainer.steps_done + 1, **_values(trainer.step()))
            is_end = trainer.steps_done == trainer.total_steps
            if is_end or trainer.steps_done % settings.eval_every == 0:
                _evaluate(trainer, report)
            if is_end or trainer.steps_done % settings.checkpoint_every == 0:
                last = checkpoints.save(trainer, loaded.manifest, checksum)
    finally:
        report.close()
    if is_first:
        print(f"plot: {(settings.output / PLOT).resolve()}")
        print(f"head: {(last / checkpoints.HEAD).resolve()}")
    return last


def _evaluate(trainer: Trainer, report: Report) -> None:
    found = trainer.evaluate()
    if not math.isfinite(found.loss):
        raise FinetuneError(f"the held-out loss is {found.loss}; lower --lr")
    report.add("held_out", trainer.steps_done, **_values(found))


def _values(record: StepRecord | Evaluation) -> dict[str, float]:
    """All of it in one dictionary."""
    values = asdict(record)
    per_depth = values.pop("per_depth")
    return {**values, **per_depth}


def _summary(trainer: Trainer) -> str:
    corpus, settings = trainer.corpus, trainer.settings
    tokens = sum(len(sample) for sample in corpus.train)
    return (
        f"{len(corpus.train)} samples of {tokens} tokens, {len(corpus.held_out)} held out; "
        f"{trainer.total_steps} steps of {settings.batch_size} samples on "
        f"{trainer.groups.dp.size()} ranks, experts over {settings.expert_parallel_size}"
        + (f"; {trainer.depths} depths" if trainer.depths > 1 else "")
    )
