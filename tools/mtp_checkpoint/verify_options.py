"""The options and limits of `verify`, apart from the work: `--help` imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Limits:
    """What may differ between the imported head and the reference.

    Attributes:
        hidden: Largest difference in a hidden state.
        tie_gap: Of router logits: experts closer than this may come in either order.
        ce: Relative difference of the mean cross-entropy.
        argmax: Least share of rows on which both prefer the same token.
        recompute: Relative difference of the mean cross-entropy from ``F.cross_entropy`` on the
            same logits.
    """

    hidden: float
    tie_gap: float
    ce: float
    argmax: float
    recompute: float = 1e-7


LIMITS = {
    "local": Limits(hidden=1e-5, tie_gap=1e-4, ce=5e-8, argmax=1.0),  # CE: equal to 7 digits
    # Transformer Engine's float32 products round their inputs to TF32's 10 bits. The mildest of
    # the mistakes that look right is off by 0.26 in the hidden state.
    "te": Limits(hidden=2e-2, tie_gap=2e-2, ce=1e-3, argmax=0.9),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options; the two directories are the caller's."""
    parser.add_argument(
        "--rows-from",
        choices=("target", "random"),
        default="target",
        help="hidden states of the target, run through transformers (default), or random ones",
    )
    parser.add_argument(
        "--text", type=Path, help="UTF-8 text for the target; default: Python's manual"
    )
    parser.add_argument(
        "--sequences", type=int, default=8, help="sequences to compare on (default 8)"
    )
    parser.add_argument("--length", type=int, default=64, help="tokens of each (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of random rows (default 0)")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest difference allowed in a hidden state (default "
        f"{LIMITS['local'].hidden:g}; te: {LIMITS['te'].hidden:g}, for TF32)",
    )
    parser.add_argument(
        "--implementation",
        choices=tuple(LIMITS),
        default="local",
        help="modules of the layer: local, on the CPU (default), or te, Transformer Engine with "
        "grouped GEMM on a GPU",
    )
    parser.add_argument("--json", type=Path, help="write all figures, per row, to this file")
