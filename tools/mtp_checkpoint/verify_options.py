"""The options and limits of `verify`, apart from the work: `--help` imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

TOLERANCE = 1e-5  # largest difference in a hidden state, in float32
TIE_GAP = 1e-4  # of router logits: experts closer than this may come in either order
CE_LIMIT = 5e-8  # relative, of the mean: equal to 7 digits
RECOMPUTE_LIMIT = 1e-7  # relative, of the mean


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
        default=TOLERANCE,
        help=f"largest difference allowed in a hidden state (default {TOLERANCE:g})",
    )
    parser.add_argument("--json", type=Path, help="write all figures, per row, to this file")
