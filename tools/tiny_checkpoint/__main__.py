"""`python -m tools.tiny_checkpoint --out DIR`: make a tiny checkpoint with an MTP head."""

from __future__ import annotations

import argparse
import sys

from tools.tiny_checkpoint.families import FAMILIES
from tools.tiny_checkpoint.family import DTYPES, LAYOUTS
from tools.tiny_checkpoint.making import make


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.tiny_checkpoint",
        description="Make a tiny but complete Hugging Face checkpoint with an MTP head: "
        "configuration, random weights, tokenizer with chat template, mtp keys in two shards.",
    )
    parser.add_argument("--out", required=True, help="directory to make; must not exist")
    parser.add_argument("--family", choices=list(FAMILIES), default="qwen3_5_moe")
    parser.add_argument("--layout", choices=LAYOUTS, help="how experts are stored")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of every tensor")
    parser.add_argument("--seed", type=int, default=0, help="of all weights (default 0)")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (default 64)")
    parser.add_argument("--experts", type=int, default=8, help="routed experts (default 8)")
    parser.add_argument("--vocab", type=int, default=768, help="tokens (default 768)")
    parser.add_argument(
        "--train-steps",
        type=int,
        default=0,
        help="steps for which the target learns Python's manual (default 0: random weights)",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 for arguments that cannot work or a full disk."""
    options = vars(_parser().parse_args(arguments))
    try:
        path = make(options.pop("out"), **options)
    except (FileExistsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror}{where}. Nothing has been written", file=sys.stderr)
        return 2
    print(f"made {path}: {options['family']}, {options['dtype']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
