"""A port is built, edited, checked and applied as the series is, and kept in step with it."""

import pytest

from forklib import ports
from tests.tools.conftest import (
    EXTRA,
    MODEL,
    OLD,
    PATCHES,
    PIN,
    TEST,
    TREE,
    files_of_release,
    make_checkout,
    patches_of,
)


def test_one_command_ports_a_series_whose_hooks_fit(sandbox, port):
    assert patches_of(sandbox) == ["0001-first.patch", "0002-second.patch"]
    model = (port.path / MODEL).read_text()
    assert "OLDER" in model and "FIRST = True" in model and "SECOND = True" in model
    assert (port.path / EXTRA).read_text() == sandbox.path(EXTRA).read_text()
    said = sandbox.ok("check", "--no-tests")
    assert f"ports/{OLD}:" in said
    assert "every patch of the series is ported or left out" in said


def test_the_prefixes_of_a_port_import_and_pass_their_tests_too(sandbox, port):
    said = sandbox.ok("--port", OLD, "check")
    assert "0002-second.patch: prefix imports and passes its tests" in said


def test_a_port_needs_no_tree_to_be_checked_and_gets_it_back(sandbox, port):
    model = (port.path / MODEL).read_text()
    port.path.rename(sandbox.path("elsewhere"))
    sandbox.ok("check", "--no-tests")
    sandbox.ok("--port", OLD, "tree")
    assert (port.path / MODEL).read_text() == model


def test_an_added_file_reaches_the_ports_with_the_series(sandbox, port):
    sandbox.write(EXTRA, "EXTRA = 2\n")
    said = sandbox.fails("check", "--no-tests")
    assert f"{EXTRA} here differs from what its patch adds. Run: make patches PORT={OLD}" in said
    sandbox.ok("patches")
    assert "+EXTRA = 2" in sandbox.path(f"{PATCHES}/0001-first.patch").read_text()
    sandbox.ok("check", "--no-tests")
    sandbox.ok("--port", OLD, "tree")
    assert (port.path / EXTRA).read_text() == "EXTRA = 2\n"


def test_a_hook_of_a_port_is_edited_in_its_own_tree(sandbox, port):
    before = sandbox.series()
    sandbox.replace(f"{TREE}/{MODEL}", "FIRST = True", "FIRST = 'older'")
    assert "uncommitted edits" in sandbox.fails("--port", OLD, "patches")
    sandbox.ok("--port", OLD, "patches", "--into", "first")
    assert "+FIRST = 'older'" in sandbox.path(f"{PATCHES}/0001-first.patch").read_text()
    assert sandbox.series() == before
    sandbox.ok("check", "--no-tests")


def test_single_files_are_left_out(sandbox, port):
    table = f'[[left-out]]\nfiles = ["{TEST}"]\nreason = "does not apply"\n\n[ported]'
    sandbox.replace(PIN, "[ported]", table)
    sandbox.ok("--port", OLD, "patches")
    assert not (port.path / TEST).exists() and (port.path / EXTRA).exists()


@pytest.mark.parametrize(
    "old, new, message",
    [
        (" LINE_20 = 20", " LINE_20 = 2O", "0002-second.patch does not apply"),
        ("+SECOND = True", "+SECOND = Trve", f"{PIN} pins tree"),
        ("From: ", "From:  ", f"{PATCHES}/0002-second.patch is not what an export writes"),
    ],
)
def test_one_byte_in_a_patch_of_a_port_is_caught(sandbox, port, old, new, message):
    sandbox.replace(f"{PATCHES}/0002-second.patch", old, new)
    assert message in sandbox.fails("check", "--no-tests")


def test_another_sdist_of_a_ports_release_is_caught(sandbox, port, older_release):
    older_release()
    assert f"sdist hash differs: {PIN} pins" in sandbox.fails("check", "--no-tests")


def test_sdists_of_ports_lie_beside_the_one_that_the_variable_names(sandbox, port, monkeypatch):
    sandbox.path("build/sdist").rename(sandbox.path("sdists"))
    monkeypatch.setenv(
        "MEGATRON_CORE_SDIST", str(sandbox.path("sdists/megatron_core-0.19.2.tar.gz"))
    )
    sandbox.ok("check", "--no-tests")


def test_apply_takes_the_port_of_the_checkouts_minor_release(sandbox, port, tmp_path):
    release = files_of_release("0.18.7", ("LINE_40 = 40", "LINE_40 = 'theirs'"))
    folder = make_checkout(tmp_path / "older", release)
    sandbox.replace(f"{TREE}/{MODEL}", "FIRST = True", "FIRST = 'older'")
    sandbox.ok("--port", OLD, "patches", "--into", "first")
    said = sandbox.ok("apply", str(folder))
    assert f"the series is made for {OLD}" in said
    assert "FIRST = 'older'" in (folder / MODEL).read_text()


def test_a_digest_knows_the_changed_lines_of_upstreams_files_alone():
    hook = "diff --git a/x b/x\nindex 1..2\n--- a/x\n+++ b/x\n@@ -{at} @@\n {near}\n+{line}\n"
    added = "diff --git a/y b/y\nnew file mode 100644\nindex 0..{blob}\n@@ @@\n+{blob}\n"

    def digest(at="1,1", near="a", line="hook", blob="one", message="why"):
        text = f"Subject: {message}\n\n" + hook + added
        return ports.hook_digest(text.format(at=at, near=near, line=line, blob=blob))

    same = [digest(), digest(at="7,9"), digest(near="b"), digest(blob="two"), digest(message="so")]
    assert len(set(same)) == 1
    assert digest(line="another") != same[0]
