"""`fork.py apply DIR` guards a user's checkout, explains a failure, and puts everything back."""

import pytest

from forklib.git import Repo
from tests.tools.conftest import EXTRA, MODEL, RELEASE_FILES, make_checkout


def snapshot(path) -> dict:
    """HEAD, branch, index and every file's bytes outside .git."""
    repo = Repo(path)
    return {
        "head": repo.line("rev-parse", "HEAD"),
        "branch": repo.line("symbolic-ref", "HEAD"),
        "index": repo.line("ls-files", "--stage"),
        "status": repo.line("status", "--porcelain"),
        "busy": repo.busy(),
        "session": repo.git_path("rebase-apply").exists(),
        "files": {
            str(p.relative_to(path)): p.read_bytes()
            for p in path.rglob("*")
            if p.is_file() and ".git" not in p.relative_to(path).parts
        },
    }


@pytest.fixture
def conflicting(tmp_path):
    """A checkout whose model differs where the second patch hooks it."""
    files = RELEASE_FILES | {MODEL: RELEASE_FILES[MODEL].replace("LINE_20 = 20", "LINE_20 = 'own'")}
    return make_checkout(tmp_path / "conflicting", files)


def test_the_series_lands_on_a_clean_checkout(sandbox, checkout):
    assert "applied 2 patches" in sandbox.ok("apply", str(checkout))
    assert Repo(checkout).tree_of("HEAD") == sandbox.git.tree_of("HEAD")


def test_a_second_apply_says_that_it_is_there_already(sandbox, checkout):
    sandbox.ok("apply", str(checkout))
    before = snapshot(checkout)
    assert "is applied in" in sandbox.ok("apply", str(checkout))
    assert snapshot(checkout) == before


def test_another_version_of_the_series_is_refused(sandbox, checkout):
    sandbox.ok("apply", str(checkout))
    sandbox.write(EXTRA, "EXTRA = 2\n")
    sandbox.ok("patches")
    assert "has another version of the series" in sandbox.fails("apply", str(checkout))


def test_a_dirty_checkout_is_refused_and_untouched(sandbox, checkout):
    (checkout / "README.md").write_text("edited\n")
    before = snapshot(checkout)
    said = sandbox.fails("apply", str(checkout))
    assert "expected a clean checkout" in said and "README.md" in said
    assert snapshot(checkout) == before


def test_staged_changes_are_refused_too(sandbox, checkout):
    (checkout / "README.md").write_text("edited\n")
    Repo(checkout)("add", "README.md")
    assert "expected a clean checkout" in sandbox.fails("apply", str(checkout))


def test_untracked_files_in_nobodys_way_are_kept(sandbox, checkout):
    (checkout / "notes.txt").write_text("mine\n")
    sandbox.ok("apply", str(checkout))
    assert (checkout / "notes.txt").read_text() == "mine\n"


def test_an_untracked_file_in_the_way_is_refused_and_kept(sandbox, checkout):
    (checkout / EXTRA).parent.mkdir(parents=True)
    (checkout / EXTRA).write_text("mine\n")
    assert f"the series adds {EXTRA}" in sandbox.fails("apply", str(checkout))
    assert (checkout / EXTRA).read_text() == "mine\n"


@pytest.mark.parametrize("minor", [18, 20])
def test_another_minor_release_is_refused_naming_both(sandbox, tmp_path, minor):
    info = f"MAJOR = 0\nMINOR = {minor}\nPATCH = 1\n"
    path = make_checkout(tmp_path / "c", RELEASE_FILES | {"megatron/core/package_info.py": info})
    said = sandbox.fails("apply", str(path))
    assert "for Megatron-Core 0.19.2" in said and f"is 0.{minor}.1" in said and "--force" in said
    assert "applied 2 patches" in sandbox.ok("apply", str(path), "--force")


def test_another_patch_release_is_allowed_with_a_note(sandbox, tmp_path):
    info = "MAJOR = 0\nMINOR = 19\nPATCH = 0\n"
    path = make_checkout(tmp_path / "c", RELEASE_FILES | {"megatron/core/package_info.py": info})
    said = sandbox.ok("apply", str(path))
    assert "made for 0.19.2" in said and "is 0.19.0" in said


def test_a_folder_that_is_no_megatron_checkout_is_refused(sandbox, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "expected a git checkout" in sandbox.fails("apply", str(tmp_path / "empty"))
    other = make_checkout(tmp_path / "other", {"a": "b"})
    assert "has no megatron/core/package_info.py" in sandbox.fails("apply", str(other))
    assert "is none" in sandbox.fails("apply", str(tmp_path / "missing"))


def test_a_folder_inside_a_checkout_is_refused(sandbox, checkout):
    said = sandbox.fails("apply", str(checkout / "megatron"))
    assert "expected the top folder of a checkout" in said


def test_a_failure_names_patch_file_and_hunk_and_both_ways_out(sandbox, conflicting):
    said = sandbox.fails("apply", str(conflicting))
    assert "0002-second.patch does not apply" in said
    assert f"{MODEL}: the hunk at line" in said
    assert "| LINE_20 = 20" in said
    assert "git am --continue" in said and "--abort" in said


def test_an_abort_leaves_the_checkout_as_it_was(sandbox, conflicting):
    (conflicting / "notes.txt").write_text("mine\n")
    before = snapshot(conflicting)
    sandbox.fails("apply", str(conflicting))
    assert snapshot(conflicting) != before
    assert "is as it was" in sandbox.ok("apply", str(conflicting), "--abort")
    assert snapshot(conflicting) == before


def test_an_abort_takes_back_a_half_made_resolution(sandbox, conflicting):
    before = snapshot(conflicting)
    sandbox.fails("apply", str(conflicting))
    (conflicting / MODEL).write_text("half\n")
    (conflicting / "README.md").write_text("half\n")
    Repo(conflicting)("add", MODEL)
    sandbox.ok("apply", str(conflicting), "--abort")
    assert snapshot(conflicting) == before


def test_an_abort_after_a_three_way_conflict_leaves_the_checkout_as_it_was(sandbox, conflicting):
    before = snapshot(conflicting)
    sandbox.fails("apply", str(conflicting), "--3way")
    sandbox.ok("apply", str(conflicting), "--abort")
    assert snapshot(conflicting) == before


def test_a_resolved_series_goes_on_with_git_am_continue(sandbox, conflicting):
    sandbox.fails("apply", str(conflicting))
    text = (conflicting / MODEL).read_text()
    (conflicting / MODEL).write_text(
        text.replace("LINE_20 = 'own'", "LINE_20 = 'own'\nSECOND = True")
    )
    repo = Repo(conflicting)
    repo("add", MODEL)
    env = {"GIT_COMMITTER_NAME": "user", "GIT_COMMITTER_EMAIL": "user@localhost"}
    repo("am", "--continue", env=env)
    assert repo.busy() is None and not repo.git_path("rebase-apply").exists()


def test_an_apply_during_a_half_applied_series_says_how_to_go_on(sandbox, conflicting):
    sandbox.fails("apply", str(conflicting))
    assert "the series is half applied" in sandbox.fails("apply", str(conflicting))


def test_an_abort_without_a_session_changes_nothing(sandbox, checkout):
    before = snapshot(checkout)
    assert "no git am in progress" in sandbox.fails("apply", str(checkout), "--abort")
    assert snapshot(checkout) == before


def test_a_session_of_the_users_own_is_not_aborted(sandbox, conflicting):
    patch = str(sandbox.path("patches/0002-second.patch"))
    env = {"GIT_COMMITTER_NAME": "user", "GIT_COMMITTER_EMAIL": "user@localhost"}
    assert Repo(conflicting).run("am", patch, env=env).returncode
    assert "another git am in progress" in sandbox.fails("apply", str(conflicting), "--abort")
    assert Repo(conflicting).busy() == "am"


def test_the_users_whitespace_settings_do_not_change_the_files(sandbox, checkout, monkeypatch):
    config = sandbox.path("gitconfig")
    config.write_text("[apply]\n whitespace = fix\n[am]\n threeWay = true\n")
    sandbox.write(EXTRA, "EXTRA = 1   \n\n\n")
    sandbox.ok("patches")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    sandbox.ok("apply", str(checkout))
    assert (checkout / EXTRA).read_text() == "EXTRA = 1   \n\n\n"
