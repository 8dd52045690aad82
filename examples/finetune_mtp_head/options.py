"""The command line's options. Imports nothing big, so that mistakes are reported at once."""

import argparse
import importlib.util
import logging
import os
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.settings import (
    DTYPES,
    ENGINES,
    IMPLEMENTATIONS,
    LONG_SAMPLES,
    Settings,
)

_NEEDED = ("torch", "transformers", "safetensors", "matplotlib", "tqdm", "tensorboard", "rich")


@dataclass(frozen=True)
class Options:
    """What to do with which settings.

    Attributes:
        settings: of the run.
        ranks: processes to start; 1 under torchrun, which starts them itself.
        resume: continue the run in the output folder.
        preflight: only check, with one step.
        export: where a copy of the model with the trained head goes, or None.
    """

    settings: Settings
    ranks: int = 1
    resume: bool = False
    preflight: bool = False
    export: Path | None = None


def parse(arguments: list[str] | None = None) -> Options:
    """Return the options; exits with status 2 on arguments that cannot work.

    Args:
        arguments: what follows the program's name; None takes the process's own.
    """
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    own = {field.name for field in fields(Settings)}
    try:
        settings = Settings(**{name: value for name, value in given.items() if name in own})
        options = Options(settings, **{k: v for k, v in given.items() if k not in own})
        _check(options)
    except FinetuneError as error:
        parser.error(str(error))
    return options


def _check(options: Options) -> None:
    settings, ranks = options.settings, options.ranks
    if ranks < 1:
        raise FinetuneError(f"--ranks must be at least 1, got {ranks}")
    if "RANK" in os.environ:
        if ranks > 1:
            raise FinetuneError("--ranks starts ranks, and torchrun has started some: drop one")
        ranks = int(os.environ["WORLD_SIZE"])
    size = settings.expert_parallel_size
    if ranks % size:
        raise FinetuneError(
            f"--expert-parallel-size {size} does not divide the {ranks} ranks; use --ranks, or "
            f"torchrun --nproc-per-node, with a multiple of {size}"
        )
    if not (settings.model / "config.json").is_file():
        raise FinetuneError(f"--model: {settings.model} has no config.json")
    if settings.output.exists() and not settings.output.is_dir():
        raise FinetuneError(f"--output must be a folder, but {settings.output} is a file")
    used = (settings.output / "metrics.jsonl").exists()
    if used and not (options.resume or options.preflight):
        raise FinetuneError(
            f"{settings.output} holds a run: continue it with --resume, or name another --output"
        )
    if options.resume and not used:
        raise FinetuneError(f"--resume: {settings.output} holds no run")
    if options.export is not None:
        _check_export(options.export, settings.output)
    for path in filter(None, (settings.output, options.export)):
        if path.resolve().is_relative_to(settings.model.resolve()):
            raise FinetuneError(f"{path} lies inside {settings.model}, which is left untouched")
    if settings.implementation == "te" and not importlib.util.find_spec("transformer_engine"):
        raise FinetuneError("--implementation te: transformer_engine is not installed")


def _check_export(export: Path, output: Path) -> None:
    """Refuse before the training what the export would refuse after it."""
    if export.exists() or export.is_symlink():
        raise FinetuneError(f"--export: {export} exists; nothing is overwritten")
    parent = export.absolute().parent
    if not (parent.is_dir() or parent == output.absolute()):
        raise FinetuneError(f"--export: {parent} does not exist; make it first")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.finetune_mtp_head",
        description="Fine-tune the MTP head of a Hugging Face model on conversations, with the "
        "model frozen. The head is Megatron's own layer, its experts spread over any number of "
        "ranks.",
        epilog="Exit status: 0 done, 1 a preflight check failed, 2 bad arguments or bad input. On "
        "GPUs start it with torchrun instead of --ranks.",
    )
    parser.set_defaults(**{f.name: f.default for f in fields(Settings) if f.name not in _REQUIRED})
    _add_action_options(parser)
    _add_data_options(parser)
    _add_training_options(parser)
    return parser


_REQUIRED = ("model", "output")


def _add_action_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--output", type=Path, required=True, help="folder of everything written")
    parser.add_argument(
        "--head",
        type=Path,
        help="checkpoint of the head, of tools.mtp_checkpoint or of a run (the model's own)",
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes to start (1)")
    parser.add_argument(
        "--preflight", action="store_true", help="make one step with all checks, and end"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in OUTPUT from its last checkpoint"
    )
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="write the model with the trained head there"
    )


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data", type=Path, help="folder of JSONL conversations (parts of Python's manual)"
    )
    group.add_argument("--held-out-data", type=Path, help="the same, for evaluation")
    _number(group, "--held-out", int, "samples to evaluate on")
    group.add_argument("--max-samples", type=int, help="training samples to keep (all)")
    _number(group, "--max-length", int, "longest sample in tokens")
    group.add_argument(
        "--long-samples", choices=LONG_SAMPLES, help="what to do with longer ones (error)"
    )
    group.add_argument(
        "--split-turns", action="store_true", help="one sample per assistant turn"
    )


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _number(group, "--expert-parallel-size", int, "ranks that share the experts")
    group.add_argument(
        "--same-batch-per-ep-group",
        action="store_true",
        help="give those ranks the same samples (different ones)",
    )
    group.add_argument(
        "--depths",
        type=int,
        metavar="K",
        help="train the one layer as K draft steps, as engines run it (1, or what --head says)",
    )
    group.add_argument(
        "--engine",
        choices=ENGINES,
        help="whose way of feeding hidden states back (vllm, or what --head says)",
    )
    group.add_argument("--implementation", choices=IMPLEMENTATIONS, help="the layer's (local)")
    group.add_argument("--dtype", choices=DTYPES, help="of the head's parameters (fp32)")
    _number(group, "--epochs", int, "passes over the samples")
    _number(group, "--batch-size", int, "samples per step, over all ranks")
    _number(group, "--micro-batch-size", int, "samples per forward")
    _number(group, "--lr", float, "peak learning rate")
    _number(group, "--min-lr", float, "final learning rate")
    _number(group, "--warmup-steps", int, "steps of linear warm-up, before the cosine decay")
    _number(group, "--weight-decay", float, "of AdamW, on matrices")
    _number(group, "--beta1", float, "of AdamW")
    _number(group, "--beta2", float, "of AdamW")
    _number(group, "--clip-grad", float, "largest gradient norm; inf does not clip")
    _number(group, "--eval-every", int, "steps between evaluations")
    _number(group, "--checkpoint-every", int, "steps between checkpoints")
    _number(group, "--keep-checkpoints", int, "newest checkpoints to keep, 0 for all")
    _number(group, "--seed", int, "of the order of samples and Megatron's generators")


def _number(group: argparse._ArgumentGroup, name: str, kind: type, text: str) -> None:
    default = getattr(Settings, name.removeprefix("--").replace("-", "_"))
    group.add_argument(name, type=kind, help=f"{text} ({default})", metavar="N")


def missing() -> str | None:
    """Return what has to be installed before the example can run, or None."""
    for name in (*_NEEDED, "megatron", "megatron.core"):
        if (found := importlib.util.find_spec(name)) is None:
            return f"{name} is not installed"
    if found.origin is None:  # this repository's own megatron/ folder holds the added files alone
        return "Megatron is not on the path (run make tree, and set PYTHONPATH=.:build/tree)"
    if not (Path(found.origin).parent / "transformer" / "mtp_objective").is_dir():
        return f"{found.origin} is Megatron without the patches"
    return None


def quieten() -> None:
    """Keep the terminal for the run: drop warnings that come with every import."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
