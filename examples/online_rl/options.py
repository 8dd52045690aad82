"""What both command lines share: options, what must be installed, how a run is started."""

import argparse
import importlib.util
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from examples.online_rl.settings import PRESETS, Settings

_NEEDED = "torch reasoning_gym matplotlib tensorboard tqdm megatron megatron.core".split()
_NUMBERS = {
    "steps": (int, "GRPO steps"),
    "warm_steps": (int, "supervised steps before them"),
    "prompts": (int, "problems per GRPO step"),
    "samples": (int, "sampled answers per problem"),
    "seed": (int, "of weights, problems and sampling (1)"),
    "temperature": (float, "of the rollouts, above 0 (1.0)"),
    "measure_every": (int, "GRPO steps between two measurements of the accepted length"),
    "measure_prompts": (int, "held-out problems answered for one"),
    "context_parallel_size": (int, "ranks per sequence, as many as torchrun starts (1)"),
}
EXIT_OK, EXIT_NOT_ISOLATED, EXIT_NOT_READY = 0, 1, 2  # argparse exits with 2 on bad arguments


def add_options(parser: argparse.ArgumentParser, output: str, seeds: int) -> None:
    """Add the options of a run of several seeds; `output` and `seeds` are their defaults."""
    parser.add_argument("--size", choices=sorted(PRESETS), default="demo", help="preset (demo)")
    for name, (kind, meaning) in _NUMBERS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=meaning)
    parser.add_argument(
        "--seeds", type=int, default=seeds, help=f"seeds to run, from --seed on ({seeds})"
    )
    parser.add_argument(
        "--isolation",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the MTP objective out of the policy (mtp_isolated_loss)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(output), help=f"folder of the report ({output})"
    )


def settings_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Settings:
    """Return the settings; exits with status 2 and a reason on options that cannot work."""
    settings = PRESETS[options.size]
    given = {name: getattr(options, name) for name in _NUMBERS}
    given = {name: value for name, value in given.items() if value is not None}
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        settings = replace(settings, **given, isolated=options.isolation)
    except ValueError as error:
        parser.error(str(error))
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    if settings.context_parallel_size != ranks:
        parser.error(
            f"--context-parallel-size is {settings.context_parallel_size} but there are {ranks} "
            f"ranks; start with `torchrun --nproc-per-node {settings.context_parallel_size}`"
        )
    if options.output.exists() and not options.output.is_dir():
        parser.error(f"--output must be a folder, but {options.output} is a file")
    return settings


def start(settings: Settings, run: Callable[..., bool]) -> int:
    """Prepare the process, call `run(groups)` with its process groups; return the exit status."""
    if missing := _missing():
        print(f"error: {missing}; start with `make demo`, or see README.md", file=sys.stderr)
        return EXIT_NOT_READY
    _quieten()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    import torch

    from tests.support import has_gpu, parallel_world, prepare

    prepare()  # before Megatron is imported: the stand-in for the device, where there is no GPU
    if has_gpu():  # some CUDA kernels add in any order; on the CPU one thread keeps it
        torch.use_deterministic_algorithms(True)
    with parallel_world(cp=settings.context_parallel_size, seed=settings.seed) as groups:
        passed = run(groups)
    return EXIT_OK if passed else EXIT_NOT_ISOLATED


def run_as_program(main: Callable[[], int]) -> None:
    """Exit with what `main` returns; Ctrl-C and SIGTERM let it report first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)


def _missing() -> str | None:
    """Return what has to be installed before the demo can run, or None; imports nothing big."""
    for name in _NEEDED:
        if (found := importlib.util.find_spec(name)) is None:
            return f"{name} is not installed"
    if found.origin is None:  # this repository's own megatron/ folder holds the added files alone
        return "Megatron is not on the path (run make demo, or set PYTHONPATH=.:build/tree)"
    if not (Path(found.origin).parent / "transformer" / "mtp_objective").is_dir():
        return f"{found.origin} is Megatron without the patches"
    return None


def _quieten() -> None:
    """Keep the terminal for the run: drop warnings that come with every import of Megatron."""
    warnings.filterwarnings("ignore")
    for name in ("megatron.core.models.gpt.gpt_model", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
