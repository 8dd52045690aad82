"""The command line of tools/fork.py."""

import argparse
import sys
from pathlib import Path

from forklib import environment, project, tree
from forklib.errors import ForkError

ROOT = Path(__file__).resolve().parents[2]


def _doctor(args: argparse.Namespace) -> int:
    problem = environment.apex_problem()
    if problem:
        raise ForkError(problem)
    return 0


def _tree(args: argparse.Namespace) -> int:
    tree.make(project.load(args.root))
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser with every verb."""
    top = argparse.ArgumentParser(prog="fork.py", description=__doc__)
    top.add_argument("--root", type=Path, default=ROOT, help="folder of fork.toml (default: here)")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name, function, text):
        one = verbs.add_parser(name, help=text, description=text)
        one.set_defaults(function=function)
        return one

    verb("doctor", _doctor, "check that this Python can run Megatron")
    verb("tree", _tree, "build or refresh build/tree: the pinned release with the series applied")
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs one verb; a ForkError becomes a message and exit status 1."""
    args = parser().parse_args(argv)
    try:
        return args.function(args)
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
