"""Training that is saved and loaded as distributed checkpoints, in any tree of Megatron.

As a script it writes, rewrites or resumes in the tree that megatron is imported from; its argument
is a JSON list of [action, fields of the Setting, directories...].
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.batches import Batch, bshd_batch
from tests.support.models import ModelSpec, build_model
from tests.support.parallel import parallel_world


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained and how.

    Attributes:
        family: Model family, as are the next three those of `ModelSpec`.
        optimizer: "fp32", "bf16" (with float32 master weights), "distributed" (in the format that
            can be read at any split) or "distributed-dp" (in the trainer's default format).
        isolated: Set ``mtp_isolated_loss``, which the release below the series does not know.
        generators: Save the random generators of every rank: resuming needs them, and as many
            ranks.
        seed: Of the weights.
    """

    family: str = "gpt"
    tied: bool = False
    repeated: bool = False
    num_experts: int = 0
    optimizer: str = "fp32"
    isolated: bool = True
    generators: bool = False
    seed: int = 0

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        dtype = torch.bfloat16 if self.optimizer == "bf16" else torch.float32
        overrides = dict(attention_dropout=0.1) if self.family == "gpt" else {}
        if self.isolated:
            overrides["mtp_isolated_loss"] = True
        return ModelSpec(
            family=self.family,
            tied=self.tied,
            repeated=self.repeated,
            num_experts=self.num_experts,
            dtype=dtype,
            hidden_size=16,
            seed=self.seed,
            overrides=overrides,
        )

    @property
    def metadata(self) -> dict:
        """What Megatron's trainer asks for."""
        found = dict(chained_optim_avoid_prefix=True)
        formats = {"distributed": "fully_reshardable", "distributed-dp": "dp_reshardable"}
        if self.optimizer in formats:
            found["distrib_optim_sharding_type"] = formats[self.optimizer]
        return found


class Trainer:
    """A model in DDP with its optimizer, driven through Megatron's schedules."""

    def __init__(self, setting: Setting, groups: Any):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.setting, self.groups = setting, groups
        distributed = setting.optimizer.startswith("distributed")
        model = build_model(setting.spec, groups)
        model.config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        self.model = DistributedDataParallel(model.config, ddp, model)
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=setting.optimizer == "bf16",
            params_dtype=setting.spec.dtype,
            clip_grad=1.0,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(
            config, [self.model], use_gloo_process_groups=False
        )

    def train(self, steps: range) -> None:
        """One microbatch of two rows per data-parallel rank and step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for step in steps:
            shift = 7 * step + 3 * self.groups.dp.rank()
            batch = bshd_batch(2, 16, mask="prompt")
            ids, labels = (batch.input_ids + shift) % 64, (batch.labels + shift) % 64
            batch = dataclasses.replace(batch, input_ids=ids, labels=labels)
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=lambda batches, model: forward_step(next(batches), model),
                data_iterator=iter([batch]),
                model=[self.model],
                num_microbatches=1,
                seq_length=16,
                micro_batch_size=2,
                forward_only=False,
            )
            self.optimizer.step()

    def state(self, is_loading: bool) -> dict:
        """The sharded state of model and optimizer, and this rank's random generators."""
        from megatron.core.dist_checkpointing import ShardedObject
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        model = self.model.module.sharded_state_dict(metadata=self.setting.metadata)
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=self.setting.metadata
        )
        state = {"model": model, "optimizer": optimizer}
        if self.setting.generators:
            generators = (torch.get_rng_state(), get_cuda_rng_tracker().get_states())
            rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
            state["rng"] = ShardedObject("rng", generators, (ranks,), (rank,), replica_id=0)
        return state

    def save(self, directory: Path) -> None:
        """Write a checkpoint."""
        from megatron.core import dist_checkpointing

        directory.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(
            self.state(False), str(directory), content_metadata=self.setting.metadata
        )

    def load(self, directory: Path) -> None:
        """Read one, whatever split wrote it; every tensor must be there, and nothing else."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.validation import StrictHandling
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        state = dist_checkpointing.load(
            self.state(True), str(directory), strict=StrictHandling.RAISE_ALL
        )
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if "rng" in state:
            torch.set_rng_state(state["rng"][0])
            get_cuda_rng_tracker().set_states(state["rng"][1])


def forward_step(batch: Batch, model: Any):
    """Token losses of a microbatch, and their mean."""
    losses = model(**batch.forward_kwargs())
    return losses, lambda out: ((out * batch.loss_mask).sum() / batch.loss_mask.sum(), {})


def write(setting: Setting, directory: Path, sizes: dict, steps: range = range(2)) -> None:
    """Train from the start and save."""
    with parallel_world(**sizes) as groups:
        trainer = Trainer(setting, groups)
        trainer.train(steps)
        trainer.save(directory)


def rewrite(
    setting: Setting, source: Path, target: Path, sizes: dict, steps: range = range(0)
) -> None:
    """Load into a model with other weights, train on and save."""
    with parallel_world(**sizes, seed=99) as groups:
        trainer = Trainer(dataclasses.replace(setting, seed=setting.seed + 1), groups)
        trainer.load(source)
        trainer.train(steps)
        trainer.save(target)


def resume(setting: Setting, directory: Path, sizes: dict) -> None:
    """Four steps; and two steps, a new world, and two more."""
    write(setting, directory / "half", sizes, range(2))
    write(setting, directory / "straight", sizes, range(4))
    rewrite(setting, directory / "half", directory / "resumed", sizes, range(2, 4))


def contents(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    from megatron.core import dist_checkpointing

    with parallel_world():
        found = dist_checkpointing.load_plain_tensors(str(directory))
    return {name: value for name, value in found.items() if torch.is_tensor(value)}


def differing(left: Path, right: Path) -> list[str]:
    """Names of tensors that are not bit for bit the same, or on one side only."""
    one, other = contents(left), contents(right)
    assert any(name.startswith("mtp.layers") for name in one)
    assert all(value.any() for name, value in one.items() if "exp_avg" in name)
    unequal = [n for n in one.keys() & other.keys() if not torch.equal(one[n], other[n])]
    return sorted(unequal + list(one.keys() ^ other.keys()))


def ranks_of(sizes: dict) -> int:
    """Ranks of a split without data parallelism; expert parallelism takes data-parallel ranks."""
    return max(sizes.values(), default=1)


if __name__ == "__main__":
    for name, fields, *paths in json.loads(sys.argv[1]):
        action = {"write": write, "rewrite": rewrite, "resume": resume}[name]
        action(Setting(**fields), *map(Path, paths), {})
