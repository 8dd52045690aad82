"""`fork.py tree` loses no work, and `fork.py patches` writes the series from its two truths."""

import os
import shutil

import pytest

from forklib.git import IDENTITY, Repo
from tests.tools.conftest import EXTRA, MESSAGE, MODEL, TEST


def model(sandbox) -> str:
    return sandbox.path(f"build/tree/{MODEL}").read_text()


def test_a_tree_built_anew_from_the_patches_is_the_pinned_one(sandbox):
    before = sandbox.git.tree_of("HEAD")
    shutil.rmtree(sandbox.tree)
    sandbox.ok("tree")
    assert sandbox.git.tree_of("HEAD") == before
    assert f'tree = "{before}"' in sandbox.path("fork.toml").read_text()


def test_a_second_run_changes_nothing(sandbox):
    before = sandbox.series()
    assert sandbox.ok("tree") == ""
    assert "0 of 2 patches changed" in sandbox.ok("patches")
    assert sandbox.series() == before


def test_an_edit_of_an_added_file_reaches_the_tree_and_its_patch_only(sandbox):
    before = sandbox.series()
    sandbox.write(EXTRA, "EXTRA = 7\n")
    sandbox.ok("tree")
    assert sandbox.path(f"build/tree/{EXTRA}").read_text() == "EXTRA = 7\n"
    sandbox.ok("patches")
    after = sandbox.series()
    assert b"+EXTRA = 7" in after["0001-first.patch"]
    assert after["0002-second.patch"] == before["0002-second.patch"]
    sandbox.ok("check", "--no-tests")


def test_a_deleted_added_file_leaves_the_tree_and_the_patch(sandbox):
    sandbox.path(TEST).unlink()
    sandbox.ok("tree")
    assert not sandbox.path(f"build/tree/{TEST}").exists()
    sandbox.ok("patches")
    assert b"test_extra.py\nnew file" not in sandbox.series()["0001-first.patch"]


def test_an_added_file_whose_patch_has_no_commit_yet_is_in_the_tree_already(sandbox):
    with sandbox.path("fork.toml").open("a") as file:
        file.write('\n[[patch]]\nslug = "third"\nadds = ["megatron/core/third.py"]\n')
    sandbox.write("megatron/core/third.py", "THIRD = 3\n")
    sandbox.ok("tree")
    assert sandbox.path("build/tree/megatron/core/third.py").read_text() == "THIRD = 3\n"
    assert "0003-third.patch" in sandbox.ok("patches")
    assert len(sandbox.series()) == 2


def test_an_added_file_edited_in_the_tree_is_not_overwritten(sandbox):
    sandbox.write(f"build/tree/{EXTRA}", "EXTRA = 'edited in the wrong place'\n")
    said = sandbox.fails("tree")
    assert EXTRA in said and "their truth is the copy in" in said
    assert "wrong place" in sandbox.path(f"build/tree/{EXTRA}").read_text()


def test_uncommitted_hooks_survive_and_are_not_exported_silently(sandbox):
    sandbox.hook("LINE_30 = 30\n", "LINE_30 = 31\n")
    sandbox.ok("tree")
    assert "LINE_30 = 31" in model(sandbox)
    said = sandbox.fails("patches")
    assert MODEL in said and "--into SLUG" in said


def test_uncommitted_hooks_fold_into_the_patch_that_is_named(sandbox):
    before = sandbox.series()
    sandbox.hook("LINE_5 = 5\n", "LINE_5 = 5\nMORE = True\n")
    sandbox.ok("patches", "--into", "first")
    after = sandbox.series()
    assert b"+MORE = True" in after["0001-first.patch"]
    assert b"MORE" not in after["0002-second.patch"].replace(b" MORE", b"")
    assert after["0001-first.patch"].count(b"Subject:") == before["0001-first.patch"].count(
        b"Subject:"
    )
    sandbox.ok("check", "--no-tests")


def test_folding_into_an_unknown_patch_names_the_known_ones(sandbox):
    sandbox.hook("LINE_5 = 5\n", "LINE_5 = 6\n")
    assert "It has: first, second." in sandbox.fails("patches", "--into", "frist")


def test_fixup_commits_are_folded_by_an_export(sandbox):
    first = sandbox.git.line("rev-parse", "HEAD~1")
    sandbox.hook("LINE_8 = 8\n", "LINE_8 = 88\n")
    sandbox.git("commit", "--quiet", "-a", "--fixup", first, env=IDENTITY)
    sandbox.ok("patches")
    assert b"+LINE_8 = 88" in sandbox.series()["0001-first.patch"]
    assert len(sandbox.git.commits("refs/fork/base", "HEAD")) == 2


def test_a_fixup_that_conflicts_leaves_the_tree_as_it_was(sandbox):
    first = sandbox.git.line("rev-parse", "HEAD~1")
    sandbox.hook("SECOND = True\n", "SECOND = 2\n")
    sandbox.git("commit", "--quiet", "-a", "--fixup", first, env=IDENTITY)
    head = sandbox.git.line("rev-parse", "HEAD")
    assert "does not fold into its patch without conflict" in sandbox.fails("patches")
    assert sandbox.git.line("rev-parse", "HEAD") == head
    assert sandbox.git.busy() is None


def test_a_new_patch_is_a_commit_and_a_table(sandbox):
    sandbox.hook("LINE_30 = 30\n", "LINE_30 = 30\nTHIRD = True\n", MESSAGE.format(what="third"))
    assert "Add a table for 'mtp: third'" in sandbox.fails("patches")
    with sandbox.path("fork.toml").open("a") as file:
        file.write('\n[[patch]]\nslug = "third"\nadds = []\n')
    sandbox.ok("patches")
    assert b"+THIRD = True" in sandbox.series()["0003-third.patch"]
    sandbox.ok("check", "--no-tests")


def test_a_new_file_made_in_the_tree_is_not_dropped_silently(sandbox):
    sandbox.write("build/tree/megatron/core/stray.py", "STRAY = 1\n")
    said = sandbox.fails("patches")
    assert "megatron/core/stray.py" in said and "Move each to the same path" in said


def test_unexported_commits_survive_when_the_patches_change(sandbox):
    sandbox.hook("LINE_30 = 30\n", "LINE_30 = 31\n", "mtp: not exported")
    head = sandbox.git.line("rev-parse", "HEAD")
    sandbox.replace("patches/0002-second.patch", "+SECOND = True", "+SECOND = False")
    assert "commits that were not exported" in sandbox.fails("tree")
    assert sandbox.git.line("rev-parse", "HEAD") == head


def test_uncommitted_edits_survive_when_the_patches_change(sandbox):
    sandbox.hook("LINE_30 = 30\n", "LINE_30 = 31\n")
    sandbox.replace("patches/0002-second.patch", "+SECOND = True", "+SECOND = False")
    assert "uncommitted edits" in sandbox.fails("tree")
    assert "LINE_30 = 31" in model(sandbox)


def test_changed_patches_are_applied_when_nothing_can_be_lost(sandbox):
    sandbox.replace("patches/0002-second.patch", "+SECOND = True", "+SECOND = False")
    sandbox.ok("tree")
    assert "SECOND = False" in model(sandbox)


def test_changed_patches_that_do_not_apply_leave_the_tree_as_it_was(sandbox):
    sandbox.replace("patches/0002-second.patch", " LINE_20 = 20", " LINE_20 = 2O")
    assert "0002-second.patch does not apply" in sandbox.fails("tree")
    assert "SECOND = True" in model(sandbox)
    assert sandbox.git.busy() is None


def test_a_tree_in_the_middle_of_a_rebase_is_left_alone(sandbox):
    env = {"GIT_SEQUENCE_EDITOR": "sed -i -e 1s/pick/edit/", **IDENTITY}
    sandbox.git.run("rebase", "-i", "refs/fork/base", env=env)
    assert "in the middle of a git rebase" in sandbox.fails("patches")


def test_the_users_git_configuration_does_not_change_the_series(sandbox, tmp_path, monkeypatch):
    before = sandbox.series()
    config = tmp_path / "gitconfig"
    config.write_text(
        "[diff]\n noprefix = true\n context = 1\n algorithm = patience\n"
        "[format]\n numbered = true\n signOff = true\n signature = mine\n"
        "[core]\n autocrlf = true\n abbrev = 7\n[commit]\n gpgSign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    shutil.rmtree(sandbox.tree)
    sandbox.ok("tree")
    sandbox.ok("patches")
    assert sandbox.series() == before


def test_the_series_applies_with_plain_git_am_on_a_repository_made_from_the_release(
    sandbox, checkout
):
    repo = Repo(checkout)
    patches = sorted(str(path) for path in sandbox.path("patches").iterdir())
    repo("am", "--quiet", *patches, env=IDENTITY)
    assert repo.tree_of("HEAD") == sandbox.git.tree_of("HEAD")


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_an_executable_added_file_stays_executable(sandbox):
    sandbox.path(TEST).chmod(0o755)
    sandbox.ok("patches")
    assert b"new file mode 100755" in sandbox.series()["0001-first.patch"]
    sandbox.ok("check", "--no-tests")


def test_an_air_gapped_site_names_its_own_copy_of_the_release(sandbox, tmp_path, monkeypatch):
    copy = tmp_path / "mirror.tar.gz"
    sandbox.path("build/sdist/megatron_core-0.19.2.tar.gz").rename(copy)
    shutil.rmtree(sandbox.tree)
    monkeypatch.setenv("MEGATRON_CORE_SDIST", str(copy))
    sandbox.ok("tree")
    monkeypatch.setenv("MEGATRON_CORE_SDIST", str(tmp_path / "nowhere.tar.gz"))
    shutil.rmtree(sandbox.tree)
    assert "MEGATRON_CORE_SDIST must name megatron_core-0.19.2.tar.gz" in sandbox.fails("tree")


def test_a_damaged_release_is_refused_with_both_hashes(sandbox):
    path = sandbox.path("build/sdist/megatron_core-0.19.2.tar.gz")
    path.write_bytes(path.read_bytes() + b"x")
    shutil.rmtree(sandbox.tree)
    said = sandbox.fails("tree")
    assert "sdist hash differs: fork.toml pins" in said and "delete it and run again" in said
    assert not sandbox.tree.exists()


def test_an_empty_commit_at_the_end_waits_for_its_files(sandbox):
    sandbox.git("commit", "--quiet", "--allow-empty", "-m", MESSAGE.format(what="x"), env=IDENTITY)
    with sandbox.path("fork.toml").open("a") as file:
        file.write('\n[[patch]]\nslug = "third"\nadds = ["megatron/core/third.py"]\n')
    assert "(empty yet: not written)" in sandbox.ok("patches")
    assert len(sandbox.series()) == 2
    sandbox.write("megatron/core/third.py", "THIRD = 3\n")
    sandbox.ok("patches")
    assert b"+THIRD = 3" in sandbox.series()["0003-third.patch"]


def test_an_empty_patch_amid_the_series_is_refused(sandbox):
    sandbox.git("reset", "--quiet", "--hard", "HEAD~1")
    sandbox.git("commit", "--quiet", "--allow-empty", "-m", MESSAGE.format(what="x"), env=IDENTITY)
    sandbox.hook("LINE_30 = 30\n", "LINE_30 = 31\n", MESSAGE.format(what="third"))
    with sandbox.path("fork.toml").open("a") as file:
        file.write('\n[[patch]]\nslug = "third"\nadds = []\n')
    assert "0002-second.patch would be empty" in sandbox.fails("patches")
