"""Command line of the demo: `python -m examples.online_rl --help`."""

import argparse
import importlib.util
import logging
import os
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from examples.online_rl.settings import PRESETS, Settings

_NEEDED = "torch reasoning_gym matplotlib tensorboard tqdm megatron megatron.core".split()
EXIT_OK, EXIT_NOT_ISOLATED, EXIT_NOT_READY = 0, 1, 2  # argparse exits with 2 on bad arguments


def parse(arguments: list[str] | None = None) -> tuple[Settings, int, Path]:
    """Return the settings, how many seeds and the output folder.

    Exits with status 2 on arguments that cannot work.

    Args:
        arguments: what follows the program's name; None takes the process's own.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    settings = PRESETS[options.size]
    given = {
        name: getattr(options, name)
        for name in ("steps", "warm_steps", "prompts", "samples", "seed", "context_parallel_size")
        if getattr(options, name) is not None
    }
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
    return settings, options.seeds, options.output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.online_rl",
        description="Online RL of a small GPT on reasoning-gym's chain_sum, once with its MTP "
        "heads trained on the sampled tokens in the same forward and once with frozen heads: the "
        "same policy to the bit, and what speculative decoding gets out of either.",
        epilog="Exit status: 0 done, 1 the isolation proof failed, 2 bad arguments, or "
        "something is not installed.",
    )
    parser.add_argument("--size", choices=sorted(PRESETS), default="demo", help="preset (demo)")
    parser.add_argument("--steps", type=int, help="GRPO steps")
    parser.add_argument("--warm-steps", type=int, help="supervised steps before them")
    parser.add_argument("--prompts", type=int, help="problems per GRPO step")
    parser.add_argument("--samples", type=int, help="sampled answers per problem")
    parser.add_argument("--seed", type=int, help="of weights, problems and sampling (1)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds to run, from --seed on (1)")
    parser.add_argument(
        "--isolation",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the MTP objective out of the policy (mtp_isolated_loss)",
    )
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        help="ranks that share each sequence, as many as torchrun starts (1)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/demo"), help="folder of the report (build/demo)"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    settings, seeds, folder = parse(arguments)
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
    from examples.online_rl.run import run

    with parallel_world(cp=settings.context_parallel_size, seed=settings.seed) as groups:
        passed = run(settings, seeds, folder, groups)
    return EXIT_OK if passed else EXIT_NOT_ISOLATED


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


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # report first, as after Ctrl-C
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
