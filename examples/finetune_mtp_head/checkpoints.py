"""Checkpoints from which a run continues as if it had never stopped.

    OUTPUT/checkpoints/step-000020/head/          what tools.mtp_checkpoint reads: load, export
    OUTPUT/checkpoints/step-000020/optimizer/     Adam's state, each rank's generators, samples seen
    OUTPUT/checkpoints/step-000020/training.json  step, settings, number of ranks, data's checksum

A checkpoint has its name only once it is complete.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.trainer import Trainer
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from tools.mtp_checkpoint.checkpoint import save_head, write_json
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.staging import staged

FOLDER, HEAD = "checkpoints", "head"
_OPTIMIZER, _STATE = "optimizer", "training.json"
_NAME = re.compile(r"step-(\d{6,})")


def save(trainer: Trainer, manifest: dict[str, Any], fingerprint: str) -> Path:
    """Write a checkpoint of the trainer's current step; every rank calls it.

    Args:
        trainer: between two steps.
        manifest: of the head, for ``mtp_head.json``.
        fingerprint: of the data.

    Returns:
        The checkpoint's folder. If there is a complete one of this step, it is left alone.

    Raises:
        FinetuneError: it cannot be written; nothing of it is left.
    """
    folder = trainer.settings.output / FOLDER
    out = folder / f"step-{trainer.steps_done:06d}"
    if out.exists():
        return out
    is_first = dist.get_rank() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".*.partial"):  # of a run that was killed
            shutil.rmtree(stale, ignore_errors=True)
    dist.barrier()
    try:
        with staged(out, owner=is_first, token="run") as partial:
            _write(trainer, partial, manifest, fingerprint)
    except (OSError, CheckpointError, CheckpointException, CheckpointingException) as error:
        raise FinetuneError(
            f"{out} cannot be written: {error}. Earlier checkpoints are complete: make room and "
            "continue with --resume"
        ) from error
    dist.barrier()
    if is_first and trainer.settings.keep_checkpoints:
        for old in _complete(folder)[: -trainer.settings.keep_checkpoints]:
            shutil.rmtree(old)
    return out


def _write(
    trainer: Trainer, partial: Path, manifest: dict[str, Any], fingerprint: str
) -> None:
    """Write everything into a folder that has no name yet."""
    is_first = dist.get_rank() == 0
    if is_first:
        (partial / _OPTIMIZER).mkdir()
    save_head(trainer.head.head, partial / HEAD, manifest)
    dist_checkpointing.save(_state(trainer, is_loading=False), str(partial / _OPTIMIZER))
    dist.barrier()
    if is_first:
        write_json(partial / _STATE, _training(trainer, fingerprint))


def latest(output: Path) -> Path:
    """The newest complete checkpoint of a run.

    Raises:
        FinetuneError: there is none.
    """
    found = _complete(output / FOLDER)
    if not found:
        raise FinetuneError(f"--resume: {output / FOLDER} holds no complete checkpoint")
    return found[-1]


def read_training(checkpoint: Path) -> dict[str, Any]:
    """The contents of ``training.json``."""
    return json.loads((checkpoint / _STATE).read_text())


def restore(trainer: Trainer, checkpoint: Path, fingerprint: str) -> None:
    """Continue where `save` left off; the head itself is loaded already. Every rank calls it.

    Raises:
        FinetuneError: the settings, the number of ranks or the data are not those of the run.
    """
    saved = read_training(checkpoint)
    trainer.settings.check_continues(saved["settings"])
    if saved["ranks"] != dist.get_world_size():
        raise FinetuneError(
            f"{checkpoint} was written by {saved['ranks']} ranks, this run has "
            f"{dist.get_world_size()}: continue with as many, or start a new run with --head "
            f"{checkpoint / HEAD}"
        )
    if saved["fingerprint"] != fingerprint:
        raise FinetuneError(
            f"the samples are not those that {checkpoint} was trained on: the data, the tokenizer "
            "or its chat template has changed; start a new run with --head "
            f"{checkpoint / HEAD}"
        )
    state = dist_checkpointing.load(
        _state(trainer, is_loading=True),
        str(checkpoint / _OPTIMIZER),
        strict=StrictHandling.RAISE_ALL,
    )
    trainer.head.optimizer.load_state_dict(state["optimizer"])
    trainer.head.schedule.step(increment=saved["step"])
    trainer.steps_done = saved["step"]
    trainer.seen.restore(state["seen"].cpu())
    _set_generators(state["generators"])


def _state(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    seen = trainer.seen.total()
    return {
        "optimizer": trainer.head.optimizer_state(is_loading),
        "generators": ShardedObject("generators", _generators(), (ranks,), (rank,), replica_id=0),
        "seen": ShardedTensor.from_rank_offsets("seen", seen, replica_id=rank),
    }


def _generators() -> tuple[Any, ...]:
    """The state of every generator that a step may draw from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(), get_cuda_rng_tracker().get_states()


def _set_generators(states: tuple[Any, ...]) -> None:
    cpu, device, tracked = states
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state(device)
    get_cuda_rng_tracker().set_states(tracked)


def _training(trainer: Trainer, fingerprint: str) -> dict[str, Any]:
    return {
        "step": trainer.steps_done,
        "total_steps": trainer.total_steps,
        "ranks": dist.get_world_size(),
        "settings": trainer.settings.as_dict(),
        "fingerprint": fingerprint,
    }


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(
        (path for path in found if (path / _STATE).is_file()),
        key=lambda path: int(_NAME.fullmatch(path.name)[1]),
    )
