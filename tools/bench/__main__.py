"""Command line of the benchmark: `python -m tools.bench --help`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Iterator

EXIT_OK, EXIT_MISSED, EXIT_NOT_READY = 0, 1, 2
SECTIONS = ("traffic", "accuracy", "objective", "width", "teacher", "step", "roofline")


def main(arguments: list[str] | None = None) -> int:
    """Measure, or write a measurement into the documentation; returns the exit status."""
    options = _parser().parse_args(arguments)
    folder = options.output or Path("build/bench" if options.device == "cpu" else "build/bench-gpu")
    if options.docs:
        return _write_docs(folder, options.device)
    _quieten()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda needs a GPU that torch can use", file=sys.stderr)
        return EXIT_NOT_READY
    try:
        _check_writable(folder)
    except OSError as error:
        print(f"error: --output: nothing can be written there: {error}", file=sys.stderr)
        return EXIT_NOT_READY
    try:
        from tests.support.unpatched import NoUnpatchedTree

        rows = _run(options, folder)
    except ModuleNotFoundError as error:
        print(f"error: {error}; start with `make bench`", file=sys.stderr)
        return EXIT_NOT_READY
    except NoUnpatchedTree as error:
        print(f"error: no unpatched Megatron to compare with: {error}", file=sys.stderr)
        return EXIT_NOT_READY
    return EXIT_MISSED if options.strict and any(row.met is False for row in rows) else EXIT_OK


def _write_docs(folder: Path, device: str) -> int:
    from tools.bench import docs, results

    try:
        docs.update(folder / results.SUMMARY, device, sections=SECTIONS)
    except (FileNotFoundError, NotADirectoryError):
        print(f"error: no figures in {folder}: measure first, without --docs", file=sys.stderr)
        return EXIT_NOT_READY
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_READY
    return EXIT_OK


def _check_writable(folder: Path) -> None:
    """Make the folder and a file in it, so that minutes of measuring are not lost at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder):
        pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="The cost of the MTP objective, measured in one process beside unpatched "
        "Megatron-Core of the same release. Writes summary.json and plots.",
        epilog="Exit status: 0 measured, 1 a goal was missed (--strict), 2 it cannot run here.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (cpu)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes: does everything run? Their figures say nothing",
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of hidden states and weights (float32; on a GPU bfloat16)",
    )
    parser.add_argument(
        "--hidden",
        type=_width,
        help="width h, a multiple of 16 (what 2,048 on a GPU is worth on this CPU; on a GPU 4096)",
    )
    parser.add_argument("--repeats", type=_count, help="runs of which medians are taken (5)")
    parser.add_argument("--threads", type=_count, default=1, help="CPU threads (1)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: count this process's CPU seconds, on a machine that is busy otherwise (wall)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder (build/bench or build/bench-gpu); the figures there are replaced",
    )
    parser.add_argument(
        "--docs",
        action="store_true",
        help="measure nothing; write the last figures into docs/performance.md",
    )
    return parser


def _width(text: str) -> int:
    if not text.isdecimal() or int(text) == 0 or int(text) % 16:
        raise argparse.ArgumentTypeError(f"expected a multiple of 16 like 128, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return int(text)


def _run(options: argparse.Namespace, folder: Path) -> list:
    import dataclasses

    import torch

    from tools.bench import growth, plots, results, sizes

    name = options.device.replace("cuda", "gpu").upper() + ("_QUICK" if options.quick else "")
    chosen = getattr(sizes, name)
    if options.repeats is not None:
        chosen = dataclasses.replace(chosen, repeats=options.repeats)
    if options.dtype is not None:
        chosen = dataclasses.replace(chosen, dtype=getattr(torch, options.dtype))
    if options.hidden is not None:
        chosen = dataclasses.replace(chosen, hidden=options.hidden)
    elif chosen.hidden is None:
        chosen = dataclasses.replace(chosen, hidden=_balanced_width(chosen))
    rows = list(_measure(options, folder, chosen))
    rows += growth.measure(rows, chosen)
    results.show(rows)
    path = results.save(folder, rows, _machine(options, chosen))
    drawn = plots.draw(folder, rows, chosen)
    print("written:", *[path, *drawn])
    return rows


def _balanced_width(chosen) -> int:
    import torch

    from tools.bench import roofline, width

    torch.set_num_threads(1)  # and no others before processes are forked
    return width.balanced(roofline.Ceilings.of_sizes(chosen, torch.device("cpu")))


def _measure(options: argparse.Namespace, folder: Path, chosen) -> Iterator[Any]:
    """All rows of the chosen sections."""
    import torch

    from tools.bench import accuracy, objective, roofline, step, teacher, timing, traffic, width
    from tools.bench.trees import load_pair, unpack_upstream

    start = time.monotonic()

    def tick(text: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {text}", file=sys.stderr, flush=True)

    tick("importing both trees")
    upstream = unpack_upstream(folder)
    pair = load_pair(upstream)
    if "traffic" in options.only:  # forks: before this process uses several threads
        yield from traffic.measure(upstream, chosen, tick)
    timing.use_clock(options.clock)
    with pair.world():
        torch.set_num_threads(options.threads)  # starting a world has set it to one
        if "accuracy" in options.only:
            tick("gradients")
            yield from accuracy.measure(pair)
        for section in (objective, width, teacher, step, roofline):
            if section.__name__.split(".")[-1] in options.only:
                yield from section.measure(pair, chosen, tick)
    tick("done")


def _machine(options: argparse.Namespace, chosen) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    import torch

    on_gpu = options.device == "cuda"
    return dict(
        device=torch.cuda.get_device_name() if on_gpu else _processor(),
        torch=torch.__version__,
        dtype=str(chosen.dtype).removeprefix("torch."),
        hidden=chosen.hidden,
        chunk=chosen.chunk,
        threads=options.threads,
        repeats=chosen.repeats,
        sections=[name for name in SECTIONS if name in options.only],
        clock=options.clock,
        quick=options.quick,
    )


def _processor() -> str:
    """The processor's name and cores."""
    import platform

    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


def _quieten() -> None:
    """Keep the terminal for the figures: drop what every import of Megatron says."""
    warnings.filterwarnings("ignore")
    for name in ("megatron.core.models.gpt.gpt_model", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
