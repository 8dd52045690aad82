"""What `verify` found: judged against its limits, and printed."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from tools.mtp_checkpoint.verify_options import LIMITS, Limits
from tools.mtp_checkpoint.verify_rows import Rows

if TYPE_CHECKING:
    from tools.mtp_checkpoint.comparing import Comparison
    from tools.mtp_checkpoint.comparing_chain import StepComparison

_SHOWN_FLIPS = 8


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
        implementation: Of the head's modules, "local" or "te".
        comparison: The figures per row.
        checks: The lines of the table.
    """

    source: str
    rows: int
    per_sequence: int
    implementation: str
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
            "implementation": self.implementation,
            "checks": checks,
            "per_row": per_row,
        }


def report_on(
    rows: Rows,
    comparison: Comparison,
    limits: Limits = LIMITS["local"],
    implementation: str = "local",
    later_steps: tuple[StepComparison, ...] = (),
) -> VerifyReport:
    """Judge a comparison with a head of this implementation, and those of later depths."""
    c = comparison

    def at_most(name: str, value: float, limit: float, unit: str = "") -> Check:
        return Check(name, value, f"≤ {limit:g}{unit}", value <= limit)

    def informative(name: str, value: float | int | None) -> Check:
        return Check(name, value, "", True)

    flips = int(c.flipped_N.sum())
    checks = [
        at_most("hidden state, max |Δ|, routers agreeing", c.hidden_delta, limits.hidden),
        informative("hidden state, root mean square", c.scale),
        informative("router flips (rows with other experts)", flips),
        at_most(
            f"router flips with a top-k gap above {limits.tie_gap:g}",
            c.flips_beyond(limits.tie_gap),
            0,
        ),
    ]
    if flips:
        checks += [
            informative("flipped rows: largest top-k gap", c.gap_N[c.flipped_N].max().item()),
            informative("flipped rows: max |Δ|", c.delta_N[c.flipped_N].max().item()),
        ]
    agreement, least = c.argmax_agreement, limits.argmax
    wanted = "= 1" if least == 1.0 else f"≥ {least:g}"
    checks += [
        Check("argmax agreement", agreement, wanted, agreement >= least),
        informative("mean CE, native (nats)", c.mean_ce("native")),
        informative("mean CE, reference (nats)", c.mean_ce("reference")),
        at_most("mean CE, relative difference", c.ce_difference("reference"), limits.ce),
        at_most(
            "mean CE against F.cross_entropy, relative",
            c.ce_difference("recomputed"),
            limits.recompute,
        ),
    ]
    if c.pre_norm_ce is not None:
        name = "mean CE if fed pre-norm states (a trained head: higher)"
        checks.append(informative(name, c.pre_norm_ce))
    for step in later_steps:
        checks += [at_most(*line) for line in step.bounded(limits)]
        checks += [informative(*line) for line in step.informative()]
    count, per_sequence = len(c.delta_N), rows.token_ids_BS.shape[1] - 2
    return VerifyReport(rows.source, count, per_sequence, implementation, c, tuple(checks))


def show(report: VerifyReport) -> None:
    """Print the report as a table, and one line that says what it means."""
    from rich.console import Console
    from rich.table import Table

    made_of = "" if report.implementation == "local" else ", Transformer Engine"
    table = Table(title=f"{report.rows} rows: {report.source}{made_of}", title_justify="left")
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
