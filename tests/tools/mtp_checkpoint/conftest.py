"""Tiny checkpoints, made once for all tests; nobody writes into them."""

from __future__ import annotations

import os

import pytest

from tests.tools.mtp_checkpoint.directories import copy_of, digests


@pytest.fixture(autouse=True)
def environment_is_restored():
    """The command line hides GPUs from its own process; a test process has other tests to run."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Give the directory of a tiny checkpoint: ``tiny("qwen3_5_moe", "packed", "fp32")``."""
    made = {}

    def get(family="qwen3_5_moe", layout=None, dtype="bf16"):
        from tools.tiny_checkpoint import make

        layout = layout or {"qwen3_5_moe": "per-expert"}.get(family)
        key = (family, layout, dtype)
        if key not in made:
            out = tmp_path_factory.mktemp("tiny") / "model"
            options = {} if layout is None else {"layout": layout}
            made[key] = make(out, family=family, dtype=dtype, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def imported(tiny, tmp_path_factory):
    """Give a checkpoint imported from a tiny one; see `tiny`, and ranks and dtype of the import."""
    made = {}

    def get(*which, ranks=1, to="fp32"):
        from tools.mtp_checkpoint.checkpoint import DTYPES
        from tools.mtp_checkpoint.importing import import_directory

        key = (which, ranks, to)
        if key not in made:
            out = tmp_path_factory.mktemp("imported") / "ckpt"
            import_directory(tiny(*which), out, ranks=ranks, dtype=DTYPES[to])
            made[key] = out
        return made[key]

    return get


@pytest.fixture
def damaged(tiny, tmp_path):
    """A per-expert checkpoint that the test may damage."""
    return copy_of(tiny(), tmp_path / "damaged")


@pytest.fixture
def untouched(tiny, imported, tmp_path):
    """A checkpoint and what to export it into; both must stay as they are, with nothing beside."""
    (tmp_path / "work").mkdir()
    checkpoint, like = imported(), tiny()
    before = digests(checkpoint), digests(like)
    yield checkpoint, like, tmp_path / "work" / "out"
    assert (digests(checkpoint), digests(like)) == before
    assert not any((tmp_path / "work").iterdir())
