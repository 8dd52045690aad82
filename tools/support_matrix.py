"""Write docs/support-matrix.md from the tests that carry a claim (`tests.support.claims`).

    python tools/support_matrix.py [--check]

Collects the tests without running them: a row of the matrix is a parameter set of a test that
`make test` runs. ``--check`` writes nothing and fails if the committed file is not up to date. The
environment is that of the tests: megatron.core and this repository on the path.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "support-matrix.md"
TESTS = ROOT / "tests" / "unit_tests" / "transformer"
HEAD = """\
# What was compared, and where

Written by `python tools/support_matrix.py` from the parameters of the tests named below; edit those.
`make test` runs every combination. "Agrees" bounds the relative difference of every parameter's
gradient from that of one rank that holds the whole model and batch: the test fails above the figure.
"a / b × c / d" means all four. A layout such as `Et|tmm|L` is Megatron's: E embedding, t layer, m head,
L loss, one stage between bars. Nothing here has been run over NCCL or with Transformer Engine.
"""
TABLE = "| combination | result | run on | test |\n|---|---|---|---|\n"
FOOT = """
## Not in the tables

- 1F1B expert overlap: one depth, `GPTModel`, no packed sequences, no full recompute; the release
  refuses the rest, and `HybridModel` has no schedule plan. With a standalone stage of heads: not
  run.
- Padding masks of experts: the release's 1F1B expert overlap does not look at them, in decoder or
  heads.
- Dynamic context parallel: multi-latent attention refuses it, Mamba layers keep the group they
  were built with (`HybridModel` was run with attention and MLP layers), and a row that one rank of
  a larger context-parallel group has to itself (`local_cp_size` 1) was not run. Over NCCL nothing
  was run.
- Recompute: no combination changed a gradient in the release below the series either, except `mlp`
  with biases, which recursed. So C18 cannot be shown failing there; its rows guard what holds.
- Experts split over tensor-parallel ranks as well (`expert_tensor_parallel_size` above 1) gather
  parts of unequal size, which gloo cannot.
- `num_distributed_optimizer_instances` above 1, whose process groups need the package einops: not
  run.
- A frozen backbone in a pipeline: not run.
"""


class Claims:
    """A pytest plugin that collects claims.

    Attributes:
        tests: {(axis, file, test): (claim, [the ids of each parameter set])}, in test order.
        errors: Modules that could not be collected.
    """

    def __init__(self) -> None:
        self.tests: dict[tuple[str, str, str], tuple] = {}
        self.errors: list[str] = []

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {report.longrepr}")

    def pytest_collection_modifyitems(self, items) -> None:
        for item in items:
            function = getattr(item, "function", None)
            claim = getattr(function, "supports", None)
            if claim is not None:
                key = claim.axis, item.path.name, function.__name__
                ids = tuple(item.callspec._idlist) if hasattr(item, "callspec") else ()
                self.tests.setdefault(key, (claim, []))[1].append(ids)


def combinations(name: str, sets: list[tuple[str, ...]]) -> list[str]:
    """The parameter sets of one test in words, one cell each.

    Several parameters that are combined in every way make one cell, "a, b × c, d".
    """
    if not sets[0]:
        return [name.removeprefix("test_").replace("_", " ")]
    values = [list(dict.fromkeys(column)) for column in zip(*sets)]
    if len(values) > 1 and set(itertools.product(*values)) == set(sets):
        return [" × ".join(" / ".join(column) for column in values)]
    return [", ".join(ids) for ids in sets]


def render(claims: Claims) -> str:
    """The whole file."""
    sections: dict[str, list[str]] = collections.defaultdict(list)
    for (axis, file, name), (claim, sets) in sorted(claims.tests.items(), key=lambda t: t[0][:2]):
        for words in combinations(name, sets):
            cells = words.replace("|", "\\|"), claim.result, claim.where, f"`{file}`"
            sections[axis].append(f"| {' | '.join(cells)} |\n")
    parts = [HEAD]
    for axis, rows in sections.items():
        parts += [f"\n## {axis}\n\n", TABLE, *rows]
    return "".join([*parts, FOOT])


def collect() -> Claims:
    """Collect all tests of the series.

    Raises:
        RuntimeError: A test module cannot be imported.
    """
    claims = Claims()
    arguments = ["--collect-only", "-qqq", "-p", "no:cacheprovider", "--no-header"]
    pytest.main([*arguments, f"--rootdir={ROOT}", str(TESTS)], plugins=[claims])
    if claims.errors:
        raise RuntimeError("support_matrix: cannot collect\n" + "\n".join(claims.errors))
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the file is not up to date")
    check = parser.parse_args().check
    text = render(collect())
    if not check:
        TARGET.write_text(text)
        return 0
    if not TARGET.exists() or TARGET.read_text() != text:
        print(f"{TARGET.name} is not up to date: run python tools/support_matrix.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
