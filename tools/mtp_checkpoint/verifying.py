"""The verb `verify`: does the imported head compute what the Hugging Face head computes?"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from tools.mtp_checkpoint import launch
from tools.mtp_checkpoint.checkpoint import DTYPES, check_fit, load_head, read_manifest
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import detect
from tools.mtp_checkpoint.reference import ReferenceHead
from tools.mtp_checkpoint.served import Served
from tools.mtp_checkpoint.source import HFDirectory
from tools.mtp_checkpoint.verify_options import LIMITS, add_arguments
from tools.mtp_checkpoint.verify_report import VerifyReport, report_on, show
from tools.mtp_checkpoint.verify_rows import random_rows, target_rows

__all__ = ["add_arguments", "run", "verify"]


def verify(
    groups: Any,
    directory: Path,
    checkpoint: Path,
    *,
    rows_from: str = "target",
    text: Path | None = None,
    batch: int = 8,
    length: int = 64,
    seed: int = 0,
    tolerance: float | None = None,
    implementation: str = "local",
) -> VerifyReport:
    """Compare a checkpoint's head with the Hugging Face directory's, in float32.

    A checkpoint stored in bfloat16 is compared with the source rounded to bfloat16: what is
    checked is the mapping and the layer, not that rounding rounds.

    Args:
        groups: Process groups of one rank; a checkpoint written at any expert-parallel size loads.
        directory: The Hugging Face directory.
        checkpoint: What `import` wrote.
        rows_from: "target" runs the target through transformers, "random" does without.
        text: What the target reads; None takes Python's manual.
        batch: Sequences.
        length: Tokens of each, at least 2 more than the head has depths.
        seed: Of random rows.
        tolerance: Largest difference allowed in a hidden state; None takes the implementation's.
        implementation: Of the head's modules: "local", or "te" on a GPU.

    Raises:
        CheckpointError: Something cannot be read, the head is of a model of another family or
            size, the target cannot be run, or Transformer Engine is asked for and not there.
    """
    # Megatron, once `launch` has found it
    from tools.mtp_checkpoint.comparing import compare
    from tools.mtp_checkpoint.comparing_chain import compare_later_steps

    source, contents = HFDirectory.open(directory), read_manifest(checkpoint)
    least = 2 + Served.read(contents).depths
    if batch < 1 or length < least:
        raise CheckpointError(
            f"rows: expected at least 1 × {least} tokens, got {batch} × {length}"
        )
    check_fit(contents, detect(source), source)
    head = load_head(
        checkpoint, groups=groups, dtype=torch.float32, implementation=implementation
    )
    stored = DTYPES[contents["dtype"]]
    reference = ReferenceHead.from_directory(source, rounded_to=stored)
    if rows_from == "target":
        rows = target_rows(source, text, batch, length)
    else:
        rows = random_rows(source, batch, length, seed)
    limits = LIMITS[implementation]
    if tolerance is not None:
        limits = dataclasses.replace(limits, hidden=tolerance)
    comparison = compare(head.eval(), reference, rows)
    later = compare_later_steps(head, reference, rows, limits)
    return report_on(rows, comparison, limits, implementation, later)


def run(options: argparse.Namespace) -> int:
    """Run the verb on one rank; 0 if everything is within its limit, else 1."""
    [report] = launch.run(
        _verify_on_one_rank, 1, options.directory, options.checkpoint, vars(options)
    )
    show(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    return 0 if report.passed else 1


def _verify_on_one_rank(groups: Any, directory: Path, checkpoint: Path, options: dict) -> Any:
    return verify(
        groups,
        directory,
        checkpoint,
        rows_from=options["rows_from"],
        text=options["text"],
        batch=options["sequences"],
        length=options["length"],
        seed=options["seed"],
        tolerance=options["tolerance"],
        implementation=options["implementation"],
    )
