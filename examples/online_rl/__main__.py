"""Command line of the demo: `python -m examples.online_rl --help`."""

import argparse
import importlib.util
import logging
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from examples.online_rl.settings import PRESETS, Settings

EXIT_OK, EXIT_NOT_ISOLATED, EXIT_NOT_READY = 0, 1, 2  # argparse exits with 2 on bad arguments


def parse(arguments: list[str] | None = None) -> tuple[Settings, Path]:
    """Return the settings and the output folder; exits with status 2 on arguments that cannot work.

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
    check_steps = options.check_steps
    if check_steps is None:
        check_steps = min(settings.check_steps, given.get("steps", settings.steps))
    if not options.verify_isolation:
        check_steps = 0
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        settings = replace(settings, **given, check_steps=check_steps, isolated=options.isolation)
    except ValueError as error:
        parser.error(str(error))
    if options.verify_isolation and check_steps == 0:
        parser.error("--verify-isolation needs --check-steps of at least 1, got 0")
    if settings.context_parallel_size != ranks:
        parser.error(
            f"--context-parallel-size is {settings.context_parallel_size} but there are {ranks} "
            f"ranks; start with `torchrun --nproc-per-node {settings.context_parallel_size}`"
        )
    if options.output.exists() and not options.output.is_dir():
        parser.error(f"--output must be a folder, but {options.output} is a file")
    return settings, options.output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.online_rl",
        description="Online RL of a small GPT on reasoning-gym's chain_sum, with MTP heads trained "
        "on the sampled tokens in the same forward, and a proof that they leave the policy alone.",
        epilog="Exit status: 0 done, 1 the isolation proof failed, 2 bad arguments, or "
        "something is not installed.",
    )
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--size", choices=sorted(PRESETS), default="demo", help="preset (demo)")
    parser.add_argument("--steps", type=int, help="GRPO steps")
    parser.add_argument("--warm-steps", type=int, help="supervised steps before them")
    parser.add_argument("--prompts", type=int, help="problems per GRPO step")
    parser.add_argument("--samples", type=int, help="sampled answers per problem")
    parser.add_argument("--seed", type=int, help="of weights, problems and sampling (1)")
    parser.add_argument(
        "--verify-isolation",
        action=flag,
        default=True,
        help="repeat GRPO steps without MTP from the same warm start and compare the policies",
    )
    parser.add_argument("--check-steps", type=int, help="GRPO steps to repeat for the comparison")
    parser.add_argument(
        "--isolation",
        action=flag,
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
    settings, folder = parse(arguments)
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
        passed = run(settings, folder, groups)
    return EXIT_OK if passed else EXIT_NOT_ISOLATED


def _missing() -> str | None:
    """Return what has to be installed before the demo can run, or None; imports nothing big."""
    for name in ("torch", "reasoning_gym", "matplotlib", "tqdm", "megatron", "megatron.core"):
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
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
