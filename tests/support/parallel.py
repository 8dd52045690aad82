"""A model-parallel world for the length of a ``with`` block."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any, Iterator

import torch
import torch.distributed as dist

from tests.support.device import backend, prepare, seed_everything
from tests.support.ranks import STORE_VARIABLE, living_groups
from tests.support.release import forget_moe_metrics

_world_numbers = itertools.count()


@contextlib.contextmanager
def parallel_world(
    tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, *, seed: int = 1234, **options: Any
) -> Iterator[Any]:
    """Start torch.distributed and Megatron's groups; end all of it, threads included, afterwards.

    Works in three places: in a rank of `run_ranks`, in a worker under torchrun, and in the test
    process itself, where it is a world of one rank. Inside one process, worlds may follow each
    other; every rank must open the same ones in the same order. Seeds every generator first, so
    what happens inside does not depend on what ran before.

    Args:
        tp: Tensor-parallel size. The sizes must divide the number of ranks; what is left over
            becomes data parallelism.
        cp: Context-parallel size.
        pp: Pipeline-parallel size.
        ep: Expert-parallel size.
        seed: Seed of all random generators, Megatron's tracker included.
        options: Further arguments of ``parallel_state.initialize_model_parallel``.

    Yields:
        The ``ProcessGroupCollection`` of this rank.

    Raises:
        RuntimeError: This process is already in a world.
    """
    if dist.is_initialized():
        raise RuntimeError("parallel_world: this process already holds a process group")
    prepare()
    _start_group()
    ended_well = False
    try:
        yield _start_model_parallel(tp, cp, pp, ep, seed, options)
        ended_well = True
    finally:
        # After an error other ranks may never come: ending the groups could wait for them, and
        # hide the error. The process is about to end anyway.
        if ended_well or dist.get_world_size() == 1:
            _end_world()


def _start_group() -> None:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    number = next(_world_numbers)
    if STORE_VARIABLE in os.environ:
        path = Path(os.environ[STORE_VARIABLE]) / f"world.{number}"
        store = dist.FileStore(str(path), world_size)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun's own store serves every world of the launch: give each its own key space.
        shared, _, _ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"world.{number}", shared)
    else:
        rank, world_size, store = 0, 1, dist.HashStore()
    dist.init_process_group(backend(), store=store, rank=rank, world_size=world_size)


def _start_model_parallel(tp: int, cp: int, pp: int, ep: int, seed: int, options: dict) -> Any:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    options.setdefault("create_gloo_process_groups", False)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        **options,
    )
    living_groups.update(dist.distributed_c10d._world.pg_map)
    seed_everything(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


def _end_world() -> None:
    """End every group and reset what Megatron keeps for the whole process."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossAutoScaler,
        MTPLossLoggingHelper,
    )

    if dist.get_world_size() > 1:
        dist.barrier()  # nobody closes connections that another rank still reads from
    parallel_state.destroy_model_parallel()
    # Upstream forgets some groups there. Their threads would live on, and break later forks.
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    # It also caches rotary frequencies by module and group: a full cache would drop a group of an
    # earlier world, without its threads, in a fork.
    RotaryEmbedding.forward.cache_clear()
    dist.destroy_process_group()
    MTPLossLoggingHelper.tracker.clear()
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    forget_moe_metrics()  # sized for the layers of the first model they saw
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # its shape depends on who set it
