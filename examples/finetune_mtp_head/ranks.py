"""Run the example on its ranks: started here, or there already because of torchrun."""

import os
import tempfile
from pathlib import Path
from typing import Any

from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.options import Options
from tests.support import has_gpu, parallel_world, prepare, run_ranks

prepare()  # before Megatron is imported: the stand-in for the device, where there is no GPU

import torch  # noqa: E402

_DAYS = 10 * 86400.0  # a long training is no hang


def on_ranks(ranks: int, options: Options) -> list[Any]:
    """Return what `rank_main` does on each rank; under torchrun, on this one alone.

    Raises:
        FinetuneError: as a rank raised it.
    """
    if ranks == 1 or "RANK" in os.environ:
        return [_reported(options)]
    with tempfile.TemporaryDirectory(prefix="finetune-") as notes:
        try:
            return run_ranks(_forked, ranks, notes, options, timeout=_DAYS)
        except AssertionError as error:
            if said := sorted(Path(notes).iterdir()):
                raise FinetuneError(said[0].read_text()) from None
            raise RuntimeError(str(error)) from None


def rank_main(options: Options) -> Any:
    """Preflight or run, in the world of this rank."""
    from transformers.utils.logging import disable_progress_bar

    from examples.finetune_mtp_head.run import run, run_preflight

    disable_progress_bar()  # one per rank, of loading the target
    if has_gpu():  # some CUDA kernels add in any order; on the CPU one thread keeps it
        torch.use_deterministic_algorithms(True, warn_only=True)
    settings = options.settings
    with parallel_world(ep=settings.expert_parallel_size, seed=settings.seed) as groups:
        if options.preflight:
            return run_preflight(settings, groups)
        return run(settings, groups, options.resume)


def _reported(options: Options) -> Any:
    """`rank_main`, with the import tool's errors as this example's."""
    from tools.mtp_checkpoint.errors import CheckpointError

    try:
        return rank_main(options)
    except CheckpointError as error:
        raise FinetuneError(str(error)) from error


def _forked(notes: str, options: Options) -> Any:
    """One rank; bad input is written down for the process that started it."""
    try:
        return _reported(options)
    except FinetuneError as error:
        (Path(notes) / os.environ["RANK"]).write_text(str(error))
        raise
