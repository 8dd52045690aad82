"""Build the documentation site, draw its figures, list the errors that it does not explain.

    python -m tools.docs_site build [--serve]     # into build/site, strictly; or served and watched
    python -m tools.docs_site figures             # writes docs/figures
    python -m tools.docs_site messages            # entries that docs/troubleshooting*.md lack
    python -m tools.docs_site pictures DIR        # screenshots of the built site, wide and narrow

`make docs` runs the first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"


def mkdocs(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run MkDocs on this repository with the API of MEGATRON_TREE, by default build/tree.

    Args:
        arguments: of `mkdocs`.
        options: of `subprocess.run`.

    Raises:
        FileNotFoundError: there is no patched Megatron in the tree.
    """
    tree = Path(os.environ.get("MEGATRON_TREE") or ROOT / "build" / "tree").absolute()
    package = tree / "megatron" / "core" / "transformer" / "mtp_objective"
    if not package.is_dir():
        raise FileNotFoundError(f"expected a patched Megatron in {tree}: run `make docs`")
    environment = {**os.environ, "MEGATRON_TREE": str(tree), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, **options)


def build_strictly(*options: str) -> subprocess.CompletedProcess:
    """Build the site so that a broken link, anchor or docstring fails.

    Never with `--quiet`: MkDocs then does not count the warnings that make a strict build fail.

    Args:
        options: further ones of `mkdocs build`.

    Returns:
        The process, with what it said as text.
    """
    return mkdocs("build", "--strict", *options, capture_output=True, text=True)


def build(serve: bool) -> int:
    """Build the site, or serve it."""
    if serve:
        return mkdocs("serve", "--strict").returncode
    done = build_strictly()
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    else:
        print(f"{SITE / 'index.html'}: open it in a browser")
    return done.returncode


def figures() -> int:
    """Draw all figures."""
    from tests.support.device import prepare

    prepare()
    from tools.docs_site.figures import FOLDER, draw

    for path in draw(ROOT / FOLDER):
        print(path.relative_to(ROOT))
    return 0


def messages() -> int:
    """Print what the troubleshooting pages lack, ready to be filled in, and what is stale there."""
    from tools.docs_site import entries
    from tools.docs_site.messages import collect

    found, written = collect(ROOT), entries.collect(ROOT)
    missing, stale = entries.unexplained(found, written), entries.stale(found, written)
    for message in missing:
        print(f"{message.where}\n{entries.stub(message)}")
    for entry in stale:
        print(f"{entry.where}: no message is `{entry.text}`")
    print(f"{len(found)} messages, {len(missing)} without an entry, {len(stale)} stale entries")
    return 1 if missing or stale else 0


def pictures(folder: Path) -> int:
    """Screenshots of every page of the built site; prints what pages complain of or ask for."""
    from tools.docs_site import browser

    folder.mkdir(parents=True, exist_ok=True)
    loud = 0
    for page in sorted(SITE.rglob("*.html")):
        name = "_".join(page.relative_to(SITE).with_suffix("").parts)
        for kind, size in (("wide", browser.DESKTOP), ("narrow", browser.MOBILE)):
            seen = browser.look(page.as_uri(), folder / f"{name}_{kind}.png", size)
            loud += len(seen.console + seen.asked)
            print(f"{name} {kind}", *seen.console, *seen.asked)
    return 1 if loud else 0


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="tools.docs_site",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build").add_argument(
        "--serve", action="store_true", help="serve it on this machine and watch docs/"
    )
    verbs.add_parser("figures")
    verbs.add_parser("messages")
    verbs.add_parser("pictures").add_argument("folder", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.verb == "build":
        return build(options.serve)
    if options.verb == "pictures":
        return pictures(options.folder)
    return {"figures": figures, "messages": messages}[options.verb]()


if __name__ == "__main__":
    sys.exit(main())
