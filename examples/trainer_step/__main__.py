"""Command line of the smallest trainer: `python -m examples.trainer_step --help`."""

import argparse
import importlib.util
import os
import sys

from examples.trainer_step import MICROBATCHES


def _missing() -> str | None:
    for name in ("torch", "megatron", "megatron.core", "megatron.core.tensor_parallel"):
        if importlib.util.find_spec(name) is None:
            if name == "torch":
                return "torch is not installed (make setup installs it into .venv)"
            return "Megatron is not on the path (run make tree, and set PYTHONPATH=.:build/tree)"
    return None


def main() -> int:
    """Start the ranks' groups, train, print a line per step."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.trainer_step",
        description="Train a tiny policy and its MTP heads on packed trajectories, on a CPU or "
        "GPU. What torchrun starts beyond the context-parallel ranks is data-parallel.",
    )
    parser.add_argument(
        "--context-parallel-size", type=int, default=1, help="ranks that share a trajectory (1)"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (20)")
    options = parser.parse_args()
    ranks, cp_size = int(os.environ.get("WORLD_SIZE", "1")), options.context_parallel_size
    if cp_size < 1 or ranks % cp_size:
        parser.error(
            f"--context-parallel-size {cp_size} does not divide the {ranks} ranks; start with "
            f"`torchrun --nproc-per-node N`, N a multiple of it"
        )
    if ranks // cp_size > MICROBATCHES:
        parser.error(
            f"{ranks // cp_size} data-parallel ranks are too many for {MICROBATCHES} microbatches; "
            f"start fewer, or raise --context-parallel-size"
        )
    if missing := _missing():
        print(f"error: {missing}; see README.md", file=sys.stderr)
        return 2
    _run(cp_size, options.steps)
    return 0


def _run(cp_size: int, steps: int) -> None:
    import torch.distributed as dist

    from examples.trainer_step.trainer import train
    from megatron.core import parallel_state, tensor_parallel
    from tests.support.device import backend

    if "RANK" in os.environ:
        dist.init_process_group(backend())
    else:
        dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for step, record in enumerate(train(steps), 1):
        if dist.get_rank() == 0:
            print(step, " ".join(f"{name} {value:.4g}" for name, value in record.items()))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
