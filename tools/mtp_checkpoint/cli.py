"""Command line: `python -m tools.mtp_checkpoint --help`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.mtp_checkpoint.engines import ENGINES
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.verify_options import add_arguments

EXIT_OK, EXIT_FOUND, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130
_EPILOG = (
    "Exit status: 0 done; 1 inspect found problems, or verify a difference above its tolerance; "
    "2 the input cannot be used, or the disk is full: nothing has been written. "
    "docs/mtp-heads.md walks through all verbs."
)


def parser() -> argparse.ArgumentParser:
    """All verbs and their arguments; imports nothing big."""
    top = argparse.ArgumentParser(
        prog="python -m tools.mtp_checkpoint",
        description="Move a model's own MTP head from a Hugging Face checkpoint into Megatron's "
        "MTP layer, compare the two, and put the trained head back into a complete directory. "
        "Runs on the CPU; only safetensors is read.",
        epilog=_EPILOG,
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    _inspect(_verb(verbs, "inspect", "show the head in a checkpoint, and what would fail"))
    _import(_verb(verbs, "import", "load the head into Megatron's layer and save that"))
    _verify(_verb(verbs, "verify", "compare an imported head with transformers' own layers"))
    _export(_verb(verbs, "export", "write a checkpoint directory with the trained head in it"))
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit status.

    Args:
        arguments: What follows the program's name; None takes the process's own.
    """
    options = parser().parse_args(arguments)
    try:
        with _terminable():
            return options.run(options)
    except CheckpointError as error:
        _complain(str(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _complain(f"{error.strerror or error}{where}. Nothing has been written")
    except KeyboardInterrupt:
        _complain("interrupted; nothing has been written")
        return EXIT_INTERRUPTED
    return EXIT_ERROR


def _verb(verbs, name: str, summary: str) -> argparse.ArgumentParser:
    text = summary[0].upper() + summary[1:] + "."
    return verbs.add_parser(name, help=summary, description=text, epilog=_EPILOG)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Reads headers alone: layout, keys, shapes, dtypes, bytes, and everything in them that "
        "would make an import fail. Values that are not finite show only on import."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="Hugging Face checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--full", action="store_true", help="one line for each expert's tensor")
    parser.set_defaults(run=_run_inspect)


def _import(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Every parameter is filled with NaN first and must be written exactly once; every tensor "
        "of the head must be used exactly once. Writes CKPT/dist (dist_checkpointing, loads into "
        "a GPTModel with MTP too), CKPT/mtp_head.json and CKPT/import_report.json."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="Hugging Face checkpoint")
    parser.add_argument("--out", type=Path, required=True, metavar="CKPT", help="new directory")
    parser.add_argument(
        "--expert-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share the experts; started here, or by torchrun (1). A checkpoint of any "
        "size loads and exports at any other",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of the parameters (fp32, which holds bfloat16 exactly and can be trained)",
    )
    parser.add_argument(
        "--depths",
        type=int,
        default=1,
        metavar="K",
        help="draft steps that the engine makes with the one layer (1): training and verify then "
        "run it K times",
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="whose way of feeding hidden states back (vllm)",
    )
    parser.add_argument("--full", action="store_true", help="one line for each expert's tensor")
    parser.set_defaults(run=_run_import)


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " In float32, row by row: hidden states and cross-entropy of the imported head against a "
        "head made of transformers' layers; where the routers chose other experts, the row is "
        "reported apart, with the gap between the experts."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="Hugging Face checkpoint")
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="what import wrote")
    add_arguments(parser)
    parser.set_defaults(run=_run_verify)


def _export(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Shards that hold tensors of the head are rewritten, all other files copied, the index "
        "rebuilt. What was written is read and imported again and compared before it gets its "
        "name. Says for each tensor whether it is bit-identical to DIR's or changed; each keeps "
        "the dtype it has in DIR."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="of any expert-parallel size")
    parser.add_argument(
        "--like", type=Path, required=True, metavar="DIR", help="checkpoint to copy; only read"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR2", help="new directory")
    parser.add_argument(
        "--layout",
        choices=("per-expert", "packed"),
        help="of the experts: one tensor for each, or all in one (as in DIR)",
    )
    parser.add_argument("--full", action="store_true", help="one line for each expert's tensor")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report as JSON, too")
    parser.set_defaults(run=_run_export)


def _run_inspect(options: argparse.Namespace) -> int:
    from tools.mtp_checkpoint.inspecting import inspect_directory, inspection_table
    from tools.mtp_checkpoint.report import console

    found = inspect_directory(options.directory)
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        console().print(inspection_table(found, options.full))
        for name in found.ignored:
            print(f"ignored, and not opened: {name}, a pickle that is no weights of the model")
        for problem in found.problems:
            print(f"problem: {problem}")
        if not found.problems:
            print("an import should succeed")
    return EXIT_FOUND if found.problems else EXIT_OK


def _run_import(options: argparse.Namespace) -> int:
    from tools.mtp_checkpoint import launch

    launch.on_cpu()
    from tools.mtp_checkpoint.checkpoint import DTYPES
    from tools.mtp_checkpoint.importing import import_directory
    from tools.mtp_checkpoint.report import console, import_table

    report = import_directory(
        options.directory,
        options.out,
        ranks=options.expert_parallel_size,
        dtype=DTYPES[options.dtype],
        depths=options.depths,
        engine=options.engine,
    )
    if report is None:  # another rank speaks
        return EXIT_OK
    console().print(import_table(report, options.full))
    if report.narrowed:
        print(f"warning: the checkpoint is wider than {options.dtype}; its last bits are lost")
    for rank, used in enumerate(report.ranks):
        print(
            f"rank {rank}: {used['bytes_read'] / 1e6:,.1f} MB read in {used['seconds']:.1f} s, "
            f"peak memory {used['peak_rss_bytes'] / 1e6:,.0f} MB"
        )
    print(f"done: {options.out}")
    return EXIT_OK


def _run_verify(options: argparse.Namespace) -> int:
    from tools.mtp_checkpoint import launch

    launch.require_one_rank("verify")
    _check_report(options.json)
    if options.implementation == "te":
        launch.on_gpu()
    else:
        launch.on_cpu()
    from tools.mtp_checkpoint import verifying

    return verifying.run(options)


def _run_export(options: argparse.Namespace) -> int:
    from tools.mtp_checkpoint import launch

    launch.require_one_rank("export")
    _check_report(options.report, options.out)
    launch.on_cpu()
    from tools.mtp_checkpoint.checkpoint import write_json
    from tools.mtp_checkpoint.export_report import export_table
    from tools.mtp_checkpoint.exporting import export_directory
    from tools.mtp_checkpoint.report import console

    report = export_directory(
        options.checkpoint, options.like, options.out, layout=options.layout
    )
    console().print(export_table(report, options.full))
    if options.report is not None:
        write_json(options.report, report.to_json())
    print(f"done: {options.out}, read and imported again")
    return EXIT_OK


def _check_report(report: Path | None, *made: Path) -> None:
    """Refuse a file that cannot be written before the work is done, and not after."""
    if report is None or report.parent in made:
        return
    if report.is_dir() or not report.absolute().parent.is_dir():
        raise CheckpointError(f"{report}: expected the name of a file in a directory that exists")


def _complain(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that what is half-written goes away."""
    if os.name == "nt" or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
