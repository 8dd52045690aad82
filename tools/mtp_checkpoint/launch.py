"""Run a verb on N ranks: started here from one command, or there already because of torchrun.

Reading and writing checkpoints needs no GPU: the command line runs its ranks on the CPU over gloo.
Only comparing Transformer Engine's layer takes one.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.mtp_checkpoint.errors import CheckpointError

_DAYS = 10 * 86400.0  # a large checkpoint on a slow disk is no hang

_TALKATIVE = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.dist_checkpointing.strategies.torch",
    "torch.utils.cpp_extension",
)


def under_torchrun() -> bool:
    """Whether torchrun, or the like, has started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Whether this process is the one that prints, creates directories and renames them."""
    return int(os.environ.get("RANK", "0")) == 0


def shared_token() -> str:
    """A name part that is the same on all ranks of this run, and on no other run's."""
    if not under_torchrun():
        return str(os.getpid())
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}-{os.environ.get('MASTER_PORT', '')}"


def require_one_rank(verb: str) -> None:
    """Refuse ranks that have nothing to do.

    Raises:
        CheckpointError: torchrun has started more than one.
    """
    if under_torchrun() and (world := int(os.environ["WORLD_SIZE"])) > 1:
        raise CheckpointError(
            f"{verb} works on one rank, whatever the expert-parallel size of the checkpoint, but "
            f"there are {world}; start it without torchrun"
        )


def on_cpu() -> None:
    """Make this process build Megatron's modules on the CPU. Call it before torch uses a GPU.

    Raises:
        CheckpointError: The patched Megatron is not there.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _quieten()
    _prepare()


def on_gpu() -> None:
    """Make this process build Transformer Engine's modules on its GPU.

    Raises:
        CheckpointError: One of the two is not there, or the patched Megatron is not.
    """
    import torch

    missing = []
    if importlib.util.find_spec("transformer_engine") is None:
        missing.append("Transformer Engine is not installed")
    if not torch.cuda.is_available():
        missing.append("torch sees no GPU")
    if missing:
        raise CheckpointError(
            f"--implementation te: {' and '.join(missing)}. Run it on a machine that has both, or "
            "use --implementation local"
        )
    _quieten()
    _prepare()


def _prepare() -> None:
    _find_megatron()
    from tests.support import prepare

    prepare()


def _quieten() -> None:
    """Keep the terminal for the tool: drop warnings that come with every import of Megatron."""
    warnings.filterwarnings("ignore")
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


def _find_megatron() -> None:
    """Take Megatron from where it is installed, or else from the tree that `make tree` builds."""
    if "megatron.core" not in sys.modules and not _is_whole():
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build" / "tree"))
        importlib.invalidate_caches()
        if not _is_whole():
            raise CheckpointError(
                "the patched Megatron is not on the path: run `make tree`, or set PYTHONPATH to it"
            )


def _is_whole() -> bool:
    """This repository's own megatron/ folder holds the added files alone, and no package."""
    found = importlib.util.find_spec("megatron.core")
    return found is not None and found.origin is not None


def run(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call ``fn(groups, *args)`` on every rank of an expert-parallel group.

    Args:
        fn: A module-level function; ``groups`` is Megatron's ProcessGroupCollection.
        ranks: Expert-parallel size. Under torchrun, that many ranks must be there.
        args: Picklable.

    Returns:
        What each rank returned, in rank order; under torchrun, this rank's result alone.

    Raises:
        CheckpointError: As a rank raised it, or there is another number of ranks.
    """
    _prepare()
    if under_torchrun():
        if (world := int(os.environ["WORLD_SIZE"])) != ranks:
            raise CheckpointError(
                f"--expert-parallel-size is {ranks} but there are {world} ranks; start "
                f"`torchrun --nproc-per-node {ranks}`, or drop torchrun: the tool starts its ranks"
            )
        return [_in_world(fn, ranks, args)]
    if ranks == 1:
        return [_in_world(fn, 1, args)]
    from tests.support import run_ranks

    with tempfile.TemporaryDirectory(prefix="mtp-ranks-") as notes:
        try:
            return run_ranks(_rank, ranks, notes, fn, ranks, args, timeout=_DAYS)
        except AssertionError as error:
            if said := sorted(Path(notes).glob("error.*")):
                raise CheckpointError(*said[0].read_text().split("\0")) from None
            raise RuntimeError(str(error)) from None


def _in_world(fn: Callable[..., Any], ranks: int, args: tuple) -> Any:
    import torch.distributed as dist

    from tests.support import parallel_world

    if dist.is_initialized():  # a library caller, or a test, already has its world
        from megatron.core.process_groups_config import ProcessGroupCollection

        return fn(ProcessGroupCollection.use_mpu_process_groups(), *args)
    with parallel_world(ep=ranks) as groups:
        return fn(groups, *args)


def _rank(notes: str, fn: Callable[..., Any], ranks: int, args: tuple) -> Any:
    """One rank; what it cannot use is written down for the process that started it."""
    try:
        return _in_world(fn, ranks, args)
    except (CheckpointError, OSError) as error:
        problems = error.problems if isinstance(error, CheckpointError) else (_os_error(error),)
        (Path(notes) / f"error.{os.environ['RANK']}").write_text("\0".join(problems))
        raise


def _os_error(error: OSError) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    name = f" ({error.filename})" if error.filename else f" in {where.name}"
    return f"{error.strerror or error}{name}"
