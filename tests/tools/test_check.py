"""`fork.py check` passes on a series without drift and names every kind of drift."""

import shutil

import pytest
from forklib import series
from forklib.git import IDENTITY

from tests.tools.conftest import EXTRA, MESSAGE, MODEL, RELEASE_FILES, TEST, make_sdist

FIRST, SECOND = "patches/0001-first.patch", "patches/0002-second.patch"


def test_a_series_without_drift_passes_with_imports_and_tests_of_every_prefix(sandbox):
    said = sandbox.ok("check")
    assert "0001-first.patch: prefix imports and passes its tests" in said
    assert "0002-second.patch: prefix imports and passes its tests" in said
    assert "FAIL" not in said


def test_check_needs_no_build_tree(sandbox):
    shutil.rmtree(sandbox.tree)
    sandbox.ok("check", "--no-tests")


def test_one_byte_in_an_added_line_of_a_patch_is_caught(sandbox):
    sandbox.replace(SECOND, "+SECOND = True", "+SECOND = Trve")
    said = sandbox.fails("check", "--no-tests")
    assert "fork.toml pins tree" in said


def test_one_byte_in_a_context_line_of_a_patch_is_caught(sandbox):
    sandbox.replace(SECOND, " LINE_20 = 20", " LINE_20 = 2O")
    said = sandbox.fails("check", "--no-tests")
    assert "0002-second.patch does not apply" in said
    assert f"{MODEL}: the hunk at line" in said


def test_one_byte_in_the_message_of_a_patch_is_caught(sandbox):
    sandbox.replace(SECOND, "From: ", "From:  ")
    assert f"{SECOND} is not what an export writes" in sandbox.fails("check", "--no-tests")


def test_one_byte_in_an_added_file_is_caught(sandbox):
    sandbox.write(EXTRA, "EXTRA = 2\n")
    said = sandbox.fails("check", "--no-tests")
    assert f"{EXTRA} here differs from what its patch adds" in said


def test_an_added_file_that_no_patch_brings_is_caught(sandbox):
    sandbox.write("megatron/core/extra/more.py", "")
    said = sandbox.fails("check", "--no-tests")
    assert "megatron/core/extra/more.py is here but no patch adds it" in said


def test_a_file_that_a_patch_brings_but_is_missing_here_is_caught(sandbox):
    sandbox.path(TEST).unlink()
    assert f"{TEST} is added by a patch but missing here" in sandbox.fails("check", "--no-tests")


def test_an_added_file_without_a_patch_is_caught(sandbox):
    sandbox.write("megatron/core/other.py", "")
    said = sandbox.fails("check", "--no-tests")
    assert "megatron/core/other.py must belong to exactly one patch, but matches: none" in said


def test_an_added_file_of_two_patches_is_caught(sandbox):
    sandbox.replace("fork.toml", "adds = []", f'adds = ["{EXTRA}"]')
    said = sandbox.fails("check", "--no-tests")
    assert f"{EXTRA} must belong to exactly one patch, but matches: first, second" in said


def test_one_digit_in_the_pinned_hash_is_caught(sandbox):
    text = sandbox.path("fork.toml").read_text()
    digest = text.split('sha256 = "')[1][:64]
    other = ("0" if digest[0] != "0" else "1") + digest[1:]
    sandbox.replace("fork.toml", digest, other)
    said = sandbox.fails("check", "--no-tests")
    assert "sdist hash differs" in said
    assert digest in said and other in said


def test_a_changed_sdist_is_caught(sandbox):
    files = RELEASE_FILES | {"README.md": "another release\n"}
    make_sdist(sandbox.path("build/sdist/megatron_core-0.19.2.tar.gz"), "0.19.2", files)
    assert "sdist hash differs" in sandbox.fails("check", "--no-tests")


def test_a_changed_pin_is_caught(sandbox):
    sandbox.replace("fork.toml", 'tree = "', 'tree = "0')
    assert "fork.toml pins tree 0" in sandbox.fails("check", "--no-tests")


def test_a_file_that_is_no_patch_in_patches_is_caught(sandbox):
    sandbox.write("patches/README.md", "")
    assert "patches/README.md is not a *.patch file" in sandbox.fails("check", "--no-tests")


def test_a_gap_in_the_numbering_is_caught(sandbox):
    sandbox.path(SECOND).rename(sandbox.path("patches/0003-second.patch"))
    said = sandbox.fails("check", "--no-tests")
    assert "patches/0003-second.patch must have number 0002" in said
    assert "patches/0002-second.patch is missing" in said


@pytest.mark.parametrize("trailer", ["Upstream", "Remove-when", "Tests"])
def test_a_missing_trailer_is_caught(sandbox, trailer):
    lines = MESSAGE.format(what="second").splitlines(keepends=True)
    message = "".join(line for line in lines if not line.startswith(trailer))
    sandbox.reword(message)
    sandbox.ok("patches")
    said = sandbox.fails("check", "--no-tests")
    assert f"0002-second.patch lacks the trailer `{trailer}:`" in said


def test_a_patch_without_a_body_is_caught(sandbox):
    message = MESSAGE.format(what="second").replace("Why second exists.\n\n", "")
    sandbox.reword(message)
    sandbox.ok("patches")
    assert "0002-second.patch has no body" in sandbox.fails("check", "--no-tests")


def test_tests_that_do_not_exist_are_caught(sandbox):
    message = MESSAGE.format(what="second").replace("test_extra", "test_gone")
    sandbox.reword(message)
    sandbox.ok("patches")
    said = sandbox.fails("check", "--no-tests")
    assert "names tests/unit_tests/test_gone.py, which the tree up to here lacks" in said


def test_a_hook_outside_megatron_is_caught(sandbox):
    sandbox.write("build/tree/README.md", "hooked\n")
    sandbox.ok("patches", "--into", "second")
    said = sandbox.fails("check", "--no-tests")
    assert "0002-second.patch changes upstream's README.md" in said


def test_a_file_added_outside_megatron_and_tests_is_caught(sandbox):
    sandbox.write("build/tree/docs/guide.md", "text\n")
    sandbox.git("add", "docs")
    sandbox.git("commit", "--quiet", "-m", MESSAGE.format(what="third"), env=IDENTITY)
    sandbox.write("patches/0003-third.patch", series.export(sandbox.git, "HEAD"))
    with sandbox.path("fork.toml").open("a") as file:
        file.write('\n[[patch]]\nslug = "third"\nadds = []\n')
    said = sandbox.fails("check", "--no-tests")
    assert "0003-third.patch adds docs/guide.md; only megatron/** and tests/** may be added" in said


def test_a_large_hook_is_a_warning_only(sandbox):
    sandbox.hook("SECOND = True\n", "".join(f"SECOND_{n} = True\n" for n in range(60)))
    sandbox.ok("patches", "--into", "second")
    assert "0002-second.patch adds 60 lines to upstream files" in sandbox.ok("check", "--no-tests")


def test_a_prefix_that_does_not_import_is_caught(sandbox):
    sandbox.hook("FIRST = True\n", "FIRST = undefined\n")
    sandbox.ok("patches", "--into", "first")
    sandbox.hook("FIRST = undefined\n", "FIRST = True\n")
    sandbox.ok("patches", "--into", "second")
    said = sandbox.fails("check")
    assert "NameError: name 'undefined' is not defined" in said
    assert "FAIL 0001-first.patch: prefix" in said
    assert " ok  0002-second.patch: prefix" in said


def test_one_prefix_can_be_run_alone(sandbox):
    said = sandbox.ok("check", "--prefix", "second")
    assert "0002-second.patch: prefix imports" in said
    assert "0001-first.patch: prefix imports" not in said
    assert "expected one of ['first', 'second']" in sandbox.fails("check", "--prefix", "third")


def test_a_prefix_whose_tests_fail_is_caught(sandbox):
    sandbox.write(EXTRA, "EXTRA = 0\n")
    sandbox.ok("patches")
    said = sandbox.fails("check")
    assert "assert 0" in said
    assert "pytest exit 1" in said
