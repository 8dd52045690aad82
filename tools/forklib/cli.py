"""The command line of tools/fork.py."""

import argparse
import sys
from pathlib import Path

from forklib import check, checkout, export, ports, project, rebase, tree
from forklib.errors import ForkError

ROOT = Path(__file__).resolve().parents[2]


def _tree(args: argparse.Namespace) -> int:
    fork = project.load(args.root, args.port)
    with fork.locked():
        tree.make(fork)
    return 0


def _patches(args: argparse.Namespace) -> int:
    fork = project.load(args.root, args.port)
    with fork.locked():
        export.write(fork, args.into)
        for port in [] if args.port else _ports(args):
            export.refresh(port)
    return 0


def _check(args: argparse.Namespace) -> int:
    fork = project.load(args.root, args.port)
    slugs = [patch.slug for patch in fork.patches]
    if args.prefix and args.prefix not in slugs:
        raise ForkError(f"no patch has the slug {args.prefix!r}; expected one of {slugs}.")
    report = check.run(fork, args.tests, args.prefix)
    failures = list(report.failures)
    for port in [] if args.port else _ports(args):
        print(f"ports/{port.base.version}:")
        report = check.run(port, run_tests=False)
        report.step("every patch of the series is ported or left out", ports.problems(fork, port))
        failures += report.failures
    if failures:
        raise ForkError(f"{len(failures)} problems; see above.")
    print("the series, its pin and its copies agree")
    return 0


def _ports(args: argparse.Namespace) -> list[project.Project]:
    versions = project.port_versions(args.root)
    return [project.load(args.root, version) for version in versions]


def _port(args: argparse.Namespace) -> int:
    fork = project.load(args.root)
    with fork.locked():
        if args.action:
            args.action(fork, args.version)
        else:
            ports.update(fork, args.version, args.sdist, args.like)
    return 0


def _rebase(args: argparse.Namespace) -> int:
    fork = project.load(args.root)
    with fork.locked():
        if args.action:
            args.action(fork, args.version)
        else:
            rebase.start(fork, args.version, args.sdist)
    return 0


def _apply(args: argparse.Namespace) -> int:
    if args.abort:
        checkout.abort(args.folder)
    else:
        fork = checkout.choose(args.root, args.folder, args.port)
        checkout.apply(fork, args.folder, args.force, args.three_way)
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser with every verb."""
    top = argparse.ArgumentParser(prog="fork.py", description=__doc__)
    top.add_argument("--root", type=Path, default=ROOT, help="folder of fork.toml (default: here)")
    top.add_argument("--port", metavar="RELEASE", help="work on ports/RELEASE, not on the series")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name, function, text):
        one = verbs.add_parser(name, help=text, description=text)
        one.set_defaults(function=function)
        return one

    verb("tree", _tree, "build or refresh build/tree: the pinned release with the series applied")
    one = verb(
        "patches", _patches, "rewrite patches/ from the added files and build/tree's commits"
    )
    one.add_argument(
        "--into", metavar="SLUG", help="fold build/tree's uncommitted edits into a patch"
    )
    one = verb("check", _check, "fail on any drift between pin, patches, added files and upstream")
    one.add_argument(
        "--no-tests",
        dest="tests",
        action="store_false",
        help="do not import every prefix of the series and run its tests",
    )
    one.add_argument(
        "--prefix", metavar="SLUG", help="run only the prefix that ends with this patch"
    )
    one = verb("rebase", _rebase, "try the series on another release, with 3-way merges")
    one.add_argument("version", help="the release, such as 0.19.1")
    one.add_argument("--sdist", type=Path, help="its sdist (default: from the package index)")
    group = one.add_mutually_exclusive_group()
    for name, function, text in (
        ("--continue", rebase.resume, "go on after conflicts were resolved"),
        ("--abort", rebase.abort, "delete the trial"),
        ("--adopt", rebase.adopt, "make a finished trial the base of the fork"),
    ):
        group.add_argument(name, dest="action", action="store_const", const=function, help=text)

    one = verb("port", _port, "replay the series onto another release, kept as ports/VERSION")
    one.add_argument("version", help="the release, such as 0.18.2")
    one.add_argument("--sdist", type=Path, help="sdist of a new port (default: the package index)")
    one.add_argument("--like", metavar="RELEASE", help="take hooks from that port, not the series")
    group = one.add_mutually_exclusive_group()
    for name, function, text in (
        ("--continue", ports.resume, "go on after conflicts were resolved"),
        ("--abort", ports.abort, "put the port's tree back as it was"),
    ):
        group.add_argument(name, dest="action", action="store_const", const=function, help=text)

    one = verb("apply", _apply, "git am the series on a Megatron-LM checkout")
    one.add_argument("folder", type=Path, metavar="DIR", help="top folder of the checkout")
    one.add_argument("--3way", dest="three_way", action="store_true", help="as git am --3way")
    one.add_argument("--force", action="store_true", help="try another minor release too")
    one.add_argument("--abort", action="store_true", help="undo a series that stopped half-way")
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs one verb; a ForkError becomes a message and exit status 1."""
    args = parser().parse_args(argv)
    try:
        return args.function(args)
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
