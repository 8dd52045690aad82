"""`fork.py rebase` tries the series on another release and never touches the fork until told to."""

import pytest

from forklib.git import Repo
from tests.tools.conftest import EXTRA, MODEL, RELEASE_FILES, make_sdist


@pytest.fixture
def release(sandbox):
    """Makes the sdist of another release with this text replaced in the model."""

    def make(version: str, *edits: tuple[str, str], **files: str) -> str:
        model = RELEASE_FILES[MODEL]
        for old, new in edits:
            assert old in model
            model = model.replace(old, new)
        path = sandbox.path(f"build/sdist/megatron_core-{version}.tar.gz")
        return make_sdist(path, version, RELEASE_FILES | {MODEL: model} | files)

    return make


def test_a_release_that_moved_the_lines_takes_the_series(sandbox, release):
    digest = release("0.19.9", ("LINE_1 = 1\n", "NEW = 0\n" * 9 + "LINE_1 = 1\n"))
    before = sandbox.series()
    said = sandbox.ok("rebase", "0.19.9")
    assert digest in said
    assert "2 patches apply to megatron-core 0.19.9" in said
    assert "1:  " in said and "mtp: first" in said
    assert sandbox.series() == before
    tree = sandbox.path("build/rebase-0.19.9")
    assert "FIRST = True" in (tree / MODEL).read_text() and (tree / EXTRA).is_file()


def test_a_patch_that_the_release_has_is_dropped(sandbox, release):
    release("0.19.9", ("LINE_20 = 20\n", "LINE_20 = 20\nSECOND = True\n"))
    said = sandbox.ok("rebase", "0.19.9")
    assert "dropped, empty on 0.19.9: 0002-second.patch" in said
    assert "1 patches apply" in said


def conflicting(sandbox, release) -> Repo:
    release("0.19.9", ("LINE_5 = 5", "LINE_5 = 'five'"), ("LINE_6 = 6", "LINE_6 = 'six'"))
    said = sandbox.fails("rebase", "0.19.9")
    assert "'mtp: first' conflicts with megatron-core 0.19.9" in said and MODEL in said
    assert "--continue" in said and "--abort" in said
    return Repo(sandbox.path("build/rebase-0.19.9"))


def test_a_conflict_is_resumed_after_it_was_resolved(sandbox, release):
    repo = conflicting(sandbox, release)
    assert "'mtp: first' conflicts" in sandbox.fails("rebase", "0.19.9", "--continue")
    assert "exists" in sandbox.fails("rebase", "0.19.9")
    model = RELEASE_FILES[MODEL].replace("LINE_5 = 5\n", "LINE_5 = 'five'\nFIRST = True\n")
    (repo.path / MODEL).write_text(model.replace("LINE_6 = 6", "LINE_6 = 'six'"))
    repo("add", MODEL)
    said = sandbox.ok("rebase", "0.19.9", "--continue")
    assert "2 patches apply to megatron-core 0.19.9" in said
    assert "SECOND = True" in (repo.path / MODEL).read_text()


def test_a_given_up_trial_leaves_nothing_behind(sandbox, release):
    before = sandbox.series(), sandbox.git.line("rev-parse", "HEAD")
    repo = conflicting(sandbox, release)
    sandbox.ok("rebase", "0.19.9", "--abort")
    assert not repo.path.exists()
    assert (sandbox.series(), sandbox.git.line("rev-parse", "HEAD")) == before
    assert "no trial" in sandbox.fails("rebase", "0.19.9", "--continue")


def test_an_adopted_trial_becomes_the_base(sandbox, release):
    digest = release("0.19.9", ("LINE_20 = 20\n", "LINE_20 = 20\nSECOND = True\n"))
    sandbox.ok("rebase", "0.19.9")
    sandbox.ok("rebase", "0.19.9", "--adopt")
    text = sandbox.path("fork.toml").read_text()
    assert 'version = "0.19.9"' in text and digest in text and 'tag = "core_v0.19.9"' in text
    assert "second" not in text
    assert list(sandbox.series()) == ["0001-first.patch"]
    sandbox.ok("tree")
    sandbox.ok("check", "--no-tests")


def test_an_unfinished_trial_is_not_adopted(sandbox, release):
    conflicting(sandbox, release)
    assert "is not finished" in sandbox.fails("rebase", "0.19.9", "--adopt")
    assert 'version = "0.19.2"' in sandbox.path("fork.toml").read_text()


def test_unexported_work_is_not_lost_to_an_adoption(sandbox, release):
    release("0.19.9")
    sandbox.ok("rebase", "0.19.9")
    sandbox.hook("LINE_30 = 30\n", "LINE_30 = 31\n")
    assert "holds work that was not exported" in sandbox.fails("rebase", "0.19.9", "--adopt")
    assert "LINE_30 = 31" in sandbox.path(f"build/tree/{MODEL}").read_text()
