"""Rank functions and data of the fine-tuning example's tests."""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.finetune_mtp_head.__main__ import main
from examples.finetune_mtp_head.bundled import write_bundled
from examples.finetune_mtp_head.loading import LoadedHead
from examples.finetune_mtp_head.run import prepared
from examples.finetune_mtp_head.settings import Settings
from examples.finetune_mtp_head.trainer import Trainer
from tests.support import parallel_world
from tools.tiny_checkpoint import make

_scratch = tempfile.TemporaryDirectory(prefix="finetune-tests-")  # until the process ends
EXPERTS = 8  # of the tiny model
_SMALL = (
    "--batch-size 8 --micro-batch-size 4 --lr 1e-2 --min-lr 1e-3 --warmup-steps 2 --eval-every 2"
).split()


@functools.cache
def tiny_model(**options: Any) -> Path:
    """A tiny checkpoint, made once per process; float32 unless asked otherwise."""
    name = "model-" + "-".join(f"{key}-{value}" for key, value in options.items())
    return make(Path(_scratch.name) / name, **{"dtype": "fp32", **options})


@functools.cache
def conversations(train: int = 36, held_out: int = 8) -> tuple[Path, Path]:
    """Folders with the first bundled conversations, so that no test encodes all of them."""
    whole = write_bundled(Path(_scratch.name) / "bundled")
    folders = []
    for source, lines in zip(whole, (train, held_out)):
        folder = Path(_scratch.name) / f"{source.name}-{lines}"
        folder.mkdir(exist_ok=True)
        text = (source / "manual.jsonl").read_text().splitlines(keepends=True)
        (folder / "part.jsonl").write_text("".join(text[:lines]))
        folders.append(folder)
    return folders[0], folders[1]


def settings(output: Path | str = "unused", **options: Any) -> Settings:
    """Settings for the tiny model: 36 samples in 5 steps, the last of 4."""
    train, held_out = conversations()
    base = dict(
        model=tiny_model(),
        output=Path(output),
        data=train,
        held_out_data=held_out,
        batch_size=8,
        micro_batch_size=3,
        lr=1e-2,
        min_lr=1e-3,
        warmup_steps=2,
        keep_checkpoints=0,
    )
    return Settings(**{**base, **options})


def data() -> list[str]:
    """A few of the bundled conversations."""
    train, held_out = conversations()
    return ["--data", str(train), "--held-out-data", str(held_out)]


def run(model: Path, output: Path, *arguments: object) -> int:
    """Run the example in this process; its ranks are forked."""
    return main(["--model", str(model), "--output", str(output), *_SMALL, *map(str, arguments)])


def build(given: Settings, groups: Any, **options: Any) -> tuple[Trainer, LoadedHead]:
    """A trainer and its head as loaded."""
    trainer, loaded, _ = prepared(given, groups, **options)
    return trainer, loaded


def whole_epoch(given: Settings) -> list[dict[str, Any]]:
    """On a rank: the records of one epoch."""
    with parallel_world(ep=given.expert_parallel_size, seed=given.seed) as groups:
        trainer, _ = build(given, groups)
        return [dataclasses.asdict(trainer.step()) for _ in range(trainer.sampler.steps_per_epoch)]


def gradients_of_first_step(given: Settings) -> dict[str, Tensor]:
    """On a rank: the gradients it holds, experts by their index in the model."""
    with parallel_world(ep=given.expert_parallel_size, seed=given.seed) as groups:
        trainer, _ = build(given, groups)
        trainer.gradients(1)
        first = groups.ep.rank() * EXPERTS // groups.ep.size()
        named = trainer.head.head.named_parameters()
        return {_in_model(name, first): p.main_grad.clone() for name, p in named}


def _in_model(name: str, first: int) -> str:
    return re.sub(
        r"local_experts\.(\d+)", lambda found: f"local_experts.{first + int(found[1])}", name
    )


def reference_of_first_step(given: Settings) -> tuple[dict[str, Tensor], float]:
    """On one rank: gradients and loss of the whole step in one batch, without DDP and objective.

    Autograd of Σ F.cross_entropy / n on hidden states that transformers itself returns, with
    targets found by a loop.
    """
    with parallel_world(seed=given.seed) as groups:
        trainer, loaded = build(given, groups)
        samples = [trainer.corpus.train[i] for i in trainer.sampler.batch(1)]
        length = max(map(len, samples))
        tokens_BS = torch.zeros(len(samples), length, dtype=torch.int64)
        rows, labels = [], []
        for b, sample in enumerate(samples):
            tokens_BS[b, : len(sample)] = sample.tokens
            for t in range(len(sample) - 2):
                if sample.mask[t + 2]:
                    rows.append((t, b))
                    labels.append(int(sample.tokens[t + 2]))
        model = trainer.target.model
        with torch.no_grad():
            hidden_BSH = model.get_decoder()(input_ids=tokens_BS).last_hidden_state
        positions_BS = torch.arange(length).expand_as(tokens_BS)
        embed = model.get_input_embeddings()
        head_SBH = loaded.head(tokens_BS, positions_BS, hidden_BSH.transpose(0, 1), embed)
        t_N, b_N = torch.tensor(rows).T
        logits_NV = model.get_output_embeddings()(head_SBH[t_N, b_N])
        loss_N = torch.nn.functional.cross_entropy(
            logits_NV, torch.tensor(labels), reduction="none"
        )
        loss = loss_N.double().sum() / len(labels)
        gradients = torch.autograd.grad(loss, list(loaded.head.parameters()), allow_unused=True)
        names = [name for name, _ in loaded.head.named_parameters()]
        return dict(zip(names, gradients, strict=True)), float(loss)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of all that a step depends on, on this rank: parameters, Adam, generators."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    found = {f"parameter/{n}": p.detach().clone() for n, p in trainer.head.head.named_parameters()}
    optimizers = getattr(
        trainer.head.optimizer, "chained_optimizers", [trainer.head.optimizer]
    )
    for number, optimizer in enumerate(optimizers):
        for place, (master, state) in enumerate(optimizer.optimizer.state.items()):
            found[f"master/{number}/{place}"] = master.detach().clone()
            for name, value in state.items():
                found[f"adam/{number}/{place}/{name}"] = torch.as_tensor(value).clone()
    found["generator/torch"] = torch.get_rng_state()
    for name, value in get_cuda_rng_tracker().get_states().items():
        found[f"generator/{name}"] = value.clone()
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names whose values are not the same to the bit, or that only one has."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    )
