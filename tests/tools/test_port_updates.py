"""`fork.py port` replays the series onto another release and keeps what was resolved there."""

from forklib.git import IDENTITY, Repo
from tests.tools.conftest import (
    EXTRA,
    MESSAGE,
    MODEL,
    OLD,
    PATCHES,
    PIN,
    TEST,
    TREE,
    files_of_release,
    patches_of,
)


def conflicting(sandbox, older_release) -> Repo:
    """A port that waits for the hook of the first patch to be resolved."""
    older_release(("LINE_5 = 5", "LINE_5 = 'five'"), ("LINE_6 = 6", "LINE_6 = 'six'"))
    said = sandbox.fails("port", OLD)
    assert f"'mtp: first' conflicts with megatron-core {OLD}" in said and MODEL in said
    assert "--continue" in said and "--abort" in said and "left-out" in said
    return Repo(sandbox.path(TREE))


def resolve(repo: Repo) -> None:
    model = files_of_release(OLD, ("LINE_6 = 6", "LINE_6 = 'six'"))[MODEL]
    (repo.path / MODEL).write_text(
        model.replace("LINE_5 = 5\n", "LINE_5 = 'five'\nFIRST = 'resolved'\n")
    )
    repo("add", MODEL)


def third_patch(sandbox) -> None:
    """Appends a patch to the series."""
    table = '\n[[patch]]\nslug = "third"\nadds = ["megatron/core/third.py"]\n'
    sandbox.write("fork.toml", sandbox.path("fork.toml").read_text() + table)
    sandbox.write("megatron/core/third.py", "THIRD = 3\n")
    sandbox.hook("LINE_30 = 30\n", "LINE_30 = 30\nTHIRD = True\n", MESSAGE.format(what="third"))
    sandbox.ok("patches")


def test_a_conflict_is_resumed_after_it_was_resolved(sandbox, older_release):
    repo = conflicting(sandbox, older_release)
    assert "'mtp: first' conflicts" in sandbox.fails("port", OLD, "--continue")
    resolve(repo)
    sandbox.ok("port", OLD, "--continue")
    model = (repo.path / MODEL).read_text()
    assert "FIRST = 'resolved'" in model and "SECOND = True" in model
    sandbox.ok("check", "--no-tests")


def test_a_given_up_update_leaves_the_port_as_it_was(sandbox, older_release):
    repo = conflicting(sandbox, older_release)
    resolve(repo)
    sandbox.ok("port", OLD, "--continue")
    sandbox.hook("FIRST = True", "FIRST = 'changed'")
    sandbox.ok("patches", "--into", "first")

    def state():
        files = [sandbox.path(f"{PATCHES}/{name}").read_bytes() for name in patches_of(sandbox)]
        return repo.line("rev-parse", "HEAD"), sandbox.path(PIN).read_text(), files

    before = state()
    assert "'mtp: first' conflicts" in sandbox.fails("port", OLD)
    sandbox.ok("port", OLD, "--abort")
    assert state() == before
    assert "FIRST = 'resolved'" in (repo.path / MODEL).read_text()
    assert "no update is under way" in sandbox.fails("port", OLD, "--continue")


def test_a_changed_hook_is_replayed_and_every_other_stays_as_resolved(sandbox, older_release):
    resolve(conflicting(sandbox, older_release))
    sandbox.ok("port", OLD, "--continue")
    sandbox.hook("SECOND = True", "SECOND = 'changed'")
    sandbox.ok("patches", "--into", "second")
    said = sandbox.fails("check", "--no-tests")
    assert "the hook of second in patches/ has changed since it was ported" in said
    assert f"Run: make port PORT={OLD}" in said
    said = sandbox.ok("port", OLD)
    assert "first: as ported" in said and "second: replayed" in said
    model = sandbox.path(f"{TREE}/{MODEL}").read_text()
    assert "FIRST = 'resolved'" in model and "SECOND = 'changed'" in model
    sandbox.ok("check", "--no-tests")


def test_a_patch_appended_to_the_series_reaches_a_port_with_the_same_command(sandbox, port):
    third_patch(sandbox)
    said = sandbox.fails("check", "--no-tests")
    assert "third is neither ported nor left out with a reason" in said
    sandbox.ok("port", OLD)
    assert patches_of(sandbox)[-1] == "0003-third.patch"
    assert (port.path / "megatron/core/third.py").read_text() == "THIRD = 3\n"
    sandbox.ok("check", "--no-tests")


def test_a_patch_is_left_out_with_a_reason_and_its_files_with_it(sandbox, port):
    third_patch(sandbox)
    table = '[[left-out]]\npatch = "third"\nreason = "nothing to hook here"\n\n[ported]'
    sandbox.replace(PIN, "[ported]", table)
    sandbox.ok("check", "--no-tests")
    sandbox.ok("port", OLD)
    assert patches_of(sandbox) == ["0001-first.patch", "0002-second.patch"]
    assert not (port.path / "megatron/core/third.py").exists()


def test_a_patch_that_is_left_out_no_longer_counts_as_ported(sandbox, port):
    sandbox.replace(PIN, "[ported]", '[[left-out]]\npatch = "second"\nreason = "why"\n\n[ported]')
    assert "second is left out, but stands under [ported]" in sandbox.fails("check", "--no-tests")
    sandbox.ok("port", OLD)
    assert patches_of(sandbox) == ["0001-first.patch"]
    sandbox.ok("check", "--no-tests")


def test_a_conflict_may_end_with_the_patch_left_out(sandbox, older_release):
    repo = conflicting(sandbox, older_release)
    sandbox.replace(PIN, "[ported]", '[[left-out]]\npatch = "first"\nreason = "why"\n\n[ported]')
    repo("cherry-pick", "--skip", env=IDENTITY)
    sandbox.ok("port", OLD, "--continue")
    assert patches_of(sandbox) == ["0001-second.patch"]
    assert not (repo.path / EXTRA).exists()


def test_a_patch_of_the_port_alone_stands_where_it_says_and_owns_its_files(sandbox, port):
    mine = '[[patch]]\nslug = "mine"\nbefore = "second"\nadds = ["tests/unit_tests/**"]\n\n[ported]'
    sandbox.replace(PIN, "[ported]", mine)
    sandbox.replace(f"{TREE}/{MODEL}", "LINE_35 = 35", "LINE_35 = 'mine'")
    port("commit", "--quiet", "-am", MESSAGE.format(what="mine"), env=IDENTITY)
    order = "sed -i '2{h;d};3G'"
    port("rebase", "-i", "refs/fork/base", env=IDENTITY | {"GIT_SEQUENCE_EDITOR": order})
    sandbox.ok("--port", OLD, "patches")
    assert patches_of(sandbox) == ["0001-first.patch", "0002-mine.patch", "0003-second.patch"]
    assert TEST in sandbox.path(f"{PATCHES}/0002-mine.patch").read_text()
    third_patch(sandbox)
    sandbox.ok("port", OLD)
    assert patches_of(sandbox)[1] == "0002-mine.patch"
    assert "LINE_35 = 'mine'" in (port.path / MODEL).read_text()


def test_hooks_come_from_a_nearer_port_when_told_so(sandbox, older_release):
    resolve(conflicting(sandbox, older_release))
    sandbox.ok("port", OLD, "--continue")
    edits = ("LINE_5 = 5", "LINE_5 = 'five'"), ("LINE_6 = 6", "LINE_6 = 'six'")
    older_release(*edits, version="0.17.9")
    sandbox.ok("port", "0.17.9", "--like", OLD)
    assert "FIRST = 'resolved'" in sandbox.path(f"build/ports/0.17.9/tree/{MODEL}").read_text()
    sandbox.ok("check", "--no-tests")


def test_work_that_was_not_exported_stops_an_update(sandbox, port):
    sandbox.replace(f"{TREE}/{MODEL}", "LINE_35 = 35", "LINE_35 = 36")
    assert f"Run: make patches PORT={OLD}" in sandbox.fails("port", OLD)
    assert "LINE_35 = 36" in (port.path / MODEL).read_text()


def test_the_release_of_the_series_is_no_port(sandbox):
    assert "is what the series itself patches" in sandbox.fails("port", "0.19.2")


def test_a_conflict_that_was_committed_by_hand_is_gone_on_from(sandbox, older_release):
    repo = conflicting(sandbox, older_release)
    resolve(repo)
    repo("commit", "--quiet", "--no-edit", env=IDENTITY)
    sandbox.ok("port", OLD, "--continue")
    assert patches_of(sandbox) == ["0001-first.patch", "0002-second.patch"]


def test_a_skipped_patch_that_is_not_left_out_is_missed(sandbox, older_release):
    repo = conflicting(sandbox, older_release)
    repo("cherry-pick", "--skip", env=IDENTITY)
    said = sandbox.fails("port", OLD, "--continue")
    assert "asks for 2 patches (first, second), but there are 1 commits" in said
    sandbox.replace(PIN, "[ported]", '[[left-out]]\npatch = "first"\nreason = "why"\n\n[ported]')
    sandbox.ok("port", OLD, "--continue")


def test_a_table_without_its_commit_is_missed(sandbox, port):
    sandbox.replace(PIN, "[ported]", '[[patch]]\nslug = "mine"\nbefore = "first"\n\n[ported]')
    assert "asks for 3 patches (mine, first, second)" in sandbox.fails("port", OLD)


def test_hooks_do_not_come_from_a_port_that_lags_behind(sandbox, port, older_release):
    older_release(version="0.17.9")
    third_patch(sandbox)
    said = sandbox.fails("port", "0.17.9", "--like", OLD)
    assert f"ports/{OLD} lags behind the series. Run: make port PORT={OLD}" in said
