"""The verb `verify`: does the imported head compute what the Hugging Face head computes?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tools.mtp_checkpoint import launch
from tools.mtp_checkpoint.checkpoint import DTYPES, check_fit, load_head, read_manifest
from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import detect
from tools.mtp_checkpoint.reference import ReferenceHead
from tools.mtp_checkpoint.served import Served
from tools.mtp_checkpoint.source import HFDirectory
from tools.mtp_checkpoint.verify_options import (
    CE_LIMIT,
    RECOMPUTE_LIMIT,
    TIE_GAP,
    TOLERANCE,
    add_arguments,
)
from tools.mtp_checkpoint.verify_rows import Rows, random_rows, target_rows

if TYPE_CHECKING:
    from tools.mtp_checkpoint.comparing import Comparison
    from tools.mtp_checkpoint.comparing_chain import StepComparison

_SHOWN_FLIPS = 8

__all__ = ["Check", "VerifyReport", "add_arguments", "report_on", "run", "show", "verify"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was measured.
        value: The figure.
        limit: The bound, in words; empty for a line that is only informative.
        passed: Whether the figure is within it.
    """

    name: str
    value: float | int | None
    limit: str
    passed: bool


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        source: Of the rows, in words.
        rows: How many there are.
        per_sequence: How many of them each sequence has.
        comparison: The figures per row.
        checks: The lines of the table.
    """

    source: str
    rows: int
    per_sequence: int
    comparison: Comparison
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Everything, per-row figures included, for a file."""
        per_row = {
            field.name.removesuffix("_N"): [_finite(x) for x in value.tolist()]
            for field in dataclasses.fields(self.comparison)
            if torch.is_tensor(value := getattr(self.comparison, field.name))
        }
        checks = [dataclasses.asdict(check) for check in self.checks]
        for check in checks:
            check["value"] = _finite(check["value"])
        return {
            "passed": self.passed,
            "rows_from": self.source,
            "rows": self.rows,
            "rows_per_sequence": self.per_sequence,
            "checks": checks,
            "per_row": per_row,
        }


def report_on(
    rows: Rows,
    comparison: Comparison,
    tolerance: float = TOLERANCE,
    later_steps: tuple[StepComparison, ...] = (),
) -> VerifyReport:
    """Judge a comparison, and those of the depths after the first."""
    c = comparison

    def at_most(name: str, value: float, limit: float, unit: str = "") -> Check:
        return Check(name, value, f"≤ {limit:g}{unit}", value <= limit)

    def informative(name: str, value: float | int | None) -> Check:
        return Check(name, value, "", True)

    flips = int(c.flipped_N.sum())
    checks = [
        at_most("hidden state, max |Δ|, routers agreeing", c.hidden_delta, tolerance),
        informative("hidden state, root mean square", c.scale),
        informative("router flips (rows with other experts)", flips),
        at_most(f"router flips with a top-k gap above {TIE_GAP:g}", c.flips_beyond_ties, 0),
    ]
    if flips:
        checks += [
            informative("flipped rows: largest top-k gap", c.gap_N[c.flipped_N].max().item()),
            informative("flipped rows: max |Δ|", c.delta_N[c.flipped_N].max().item()),
        ]
    agreement = c.argmax_agreement
    checks += [
        Check("argmax agreement", agreement, "= 1", agreement == 1.0),
        informative("mean CE, native (nats)", c.mean_ce("native")),
        informative("mean CE, reference (nats)", c.mean_ce("reference")),
        at_most("mean CE, relative difference", c.ce_difference("reference"), CE_LIMIT),
        at_most(
            "mean CE against F.cross_entropy, relative",
            c.ce_difference("recomputed"),
            RECOMPUTE_LIMIT,
        ),
    ]
    if c.pre_norm_ce is not None:
        name = "mean CE if fed pre-norm states (a trained head: higher)"
        checks.append(informative(name, c.pre_norm_ce))
    for s in later_steps:
        checks += [at_most(*line) for line in s.bounded(tolerance)]
        checks += [informative(*line) for line in s.informative()]
    count, per_sequence = len(c.delta_N), rows.token_ids_BS.shape[1] - 2
    return VerifyReport(rows.source, count, per_sequence, c, tuple(checks))


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
    tolerance: float = TOLERANCE,
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
        tolerance: Largest difference allowed in a hidden state.

    Raises:
        CheckpointError: Something cannot be read, the head is of a model of another family or
            size, or the target cannot be run.
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
    head = load_head(checkpoint, groups=groups, dtype=torch.float32)
    stored = DTYPES[contents["dtype"]]
    reference = ReferenceHead.from_directory(source, rounded_to=stored)
    if rows_from == "target":
        rows = target_rows(source, text, batch, length)
    else:
        rows = random_rows(source, batch, length, seed)
    comparison = compare(head.eval(), reference, rows)
    return report_on(rows, comparison, tolerance, compare_later_steps(head, reference, rows))


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
    )


def show(report: VerifyReport) -> None:
    """Print the report as a table, and one line that says what it means."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.rows} rows: {report.source}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("limit")
    table.add_column("")
    for check in report.checks:
        verdict = "" if not check.limit else "[green]ok[/]" if check.passed else "[red]FAILED[/]"
        table.add_row(check.name, _figure(check.value), check.limit, verdict)
    console = Console()
    console.print(table)
    _show_flips(report, console)
    if report.passed:
        console.print("The imported head computes what the checkpoint's head computes.")
        return
    failed = ", ".join(check.name for check in report.checks if not check.passed)
    console.print(f"[red]Not the same head[/]: {failed}.")


def _show_flips(report: VerifyReport, console: Any) -> None:
    """Name the rows whose routers disagree, the least tied first."""
    c = report.comparison
    flipped = c.flipped_N.nonzero().flatten().tolist()
    flipped.sort(key=lambda row: -c.gap_N[row].item())
    for row in flipped[:_SHOWN_FLIPS]:
        sequence, position = divmod(row, report.per_sequence)
        console.print(
            f"other experts in sequence {sequence}, position {position}: top-k gap "
            f"{c.gap_N[row].item():.2e}, max |Δ| {c.delta_N[row].item():.2e}"
        )
    if len(flipped) > _SHOWN_FLIPS:
        console.print(f"and in {len(flipped) - _SHOWN_FLIPS} more rows; --json has all")


def _figure(value: float | int | None) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
