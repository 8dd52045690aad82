"""The figures show what the code computes, and the committed ones are those that it draws.

Run: pytest tests/docs/test_figures.py
"""

import re

import matplotlib
import pytest

from tests.docs.pages import ROOT
from tests.support.device import prepare

prepare()

from tools.docs_site import figures  # noqa: E402

FOLDER = ROOT / figures.FOLDER


def test_depths_are_rows_that_one_can_check_by_hand():
    rows = figures.depth_rows()
    assert rows["token"] == "10 11 12 13 14 15 20 21 22 23".split()
    assert rows["policy"] == "– 12 13 14 15 – – 22 23 –".split()
    assert rows["depth 1"] == "12 13 14 15 – – 22 23 – –".split()
    assert rows["depth 2"] == "13 14 15 – – – 23 – – –".split()


def test_owners_are_mirrored_in_each_sequence():
    assert figures.owners(4, [16], packed=False) == [0, 0, 1, 1, 2, 2, 3, 3] + [
        3, 3, 2, 2, 1, 1, 0, 0
    ]  # fmt: skip
    assert figures.owners(2, [8, 7], packed=True) == [0, 0, 1, 1, 1, 1, 0, 0] * 2


def test_weights_are_those_of_the_formulas():
    assert figures.SEQUENCES == [[6], [1, 3]]
    wanted = {
        "token-mean": [[1 / 10], [1 / 10, 1 / 10]],
        # weights 1 / (supervised positions of the policy), which are one more than depth 1's
        "sequence-mean": [[1 / 7 / 3], [1 / 2 / 3, 1 / 4 / 3]],
        "microbatch-mean": [[1 / 6 / 2], [1 / 4 / 2, 1 / 4 / 2]],
    }
    for weighting, weights in wanted.items():
        for got, want in zip(figures.target_weights(weighting), weights, strict=True):
            assert got == pytest.approx(want, rel=1e-6), weighting


def test_the_committed_figures_are_those_that_are_drawn(tmp_path):
    drawn = figures.draw(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in FOLDER.iterdir()}
    for path in drawn:
        committed = (FOLDER / path.name).read_text()
        (version,) = re.findall(r"Matplotlib v([\d.]+)", committed)
        if version != matplotlib.__version__:
            pytest.skip(f"drawn with matplotlib {version}, here is {matplotlib.__version__}")
        assert path.read_text() == committed, f"{path.name}: python -m tools.docs_site figures"
