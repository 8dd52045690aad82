"""CPU replacements for the Megatron-Core functions that assume a CUDA device."""

from __future__ import annotations

import logging
import queue

import torch

from tests.support.standin._replace import replace


def install() -> None:
    """Replace random states, MoE split sizes and the checkpoint writer's result queue."""
    _install_random_state()
    _install_token_dispatcher()
    _install_checkpoint_queue()


def _install_random_state() -> None:
    """Let the tensor-parallel random tracker save and restore the CPU generator."""
    from megatron.core.tensor_parallel import random

    replace(
        random, "_get_cuda_rng_state", lambda _original, *_args, **_kwargs: torch.get_rng_state()
    )
    replace(
        random,
        "_set_cuda_rng_state",
        lambda _original, new_state, *_args, **_kwargs: torch.set_rng_state(new_state),
    )
    # The tracker warns each time its block moves the CPU generator; here that is its purpose.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _install_token_dispatcher() -> None:
    """Return numpy split sizes for CPU tensors too: upstream converts only CUDA ones."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(original, tensor, as_numpy=False, record_stream=False):
        if torch.is_tensor(tensor) and as_numpy:
            return tensor.numpy()
        return tensor

    replace(token_dispatcher, "maybe_move_tensor_to_cpu", to_cpu)


def _install_checkpoint_queue() -> None:
    """Write checkpoints without a multiprocessing manager.

    Its spawned process imports the main module again, which hangs scripts without a main guard.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results = queue.Queue()
    replace(
        filesystem_async, "get_write_results_queue", lambda _original, *_args, **_kwargs: results
    )
