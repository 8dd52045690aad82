"""``--help`` of Megatron's own parser works and explains the flags of the series.

    python -m pytest tests/unit_tests/transformer/test_mtp_help.py

Run as a script it prints the help of the tree that megatron is imported from.
"""

import argparse
import sys
from pathlib import Path

import pytest

from tests.support import prepare
from tests.support.unpatched import NoUnpatchedTree, run_in_tree, unpatched_tree

prepare()

from megatron.training.arguments import add_megatron_arguments


def parser() -> argparse.ArgumentParser:
    """As ``megatron.training`` makes it."""
    made = argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)
    return add_megatron_arguments(made)


def test_help_is_printed_with_a_useful_text_for_each_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--mtp-isolated-loss If True" in text
    assert "trains nothing but the MTP heads" in text
    assert "--mtp-loss-mask-mode {target,path} Which Multi-Token Prediction (MTP) targets" in text
    assert "--mtp-loss-normalization {microbatch,global} How Multi-Token" in text


def test_percent_signs_of_docstrings_appear_as_they_were_written():
    assert "(e.g. 1.10 = 10%)" in " ".join(parser().format_help().split())


def test_the_release_below_the_series_cannot_print_its_help(tmp_path):
    """What the first test would find there."""
    try:
        tree = unpatched_tree(tmp_path / "unpatched")
    except NoUnpatchedTree as reason:
        pytest.skip(str(reason))
    with pytest.raises(AssertionError, match="unsupported format character"):
        run_in_tree(tree, Path(__file__))


if __name__ == "__main__":
    sys.stdout.write(parser().format_help())
