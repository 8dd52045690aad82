"""`make doctor` names what is installed, what is wrong, and what to do about it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forklib import doctor, project

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fork():
    return project.load(ROOT)


def megatron_in(folder: Path, fork, monkeypatch) -> list[doctor.Finding]:
    """What the doctor finds when `folder` is the only place with a `megatron`."""
    for name in [m for m in sys.modules if m == "megatron" or m.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(folder)])
    return list(doctor.megatron(fork))


@pytest.fixture
def checkout(tmp_path, fork):
    """A Megatron checkout in miniature with the whole series in it."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\n")
    for path, file in fork.added_files().items():
        if path.startswith("megatron/"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, tmp_path / path)
    return tmp_path


def test_a_whole_series_is_ok_and_the_release_is_named(checkout, fork, monkeypatch):
    release, series = megatron_in(checkout, fork, monkeypatch)
    assert (release.state, series.state) == (doctor.OK, doctor.OK)
    assert release.detail.startswith("0.19.2 in")
    assert f"all of its {len(fork.patches)} patches" in series.detail


def test_a_changed_or_lacking_file_of_the_series_is_wrong_and_named(checkout, fork, monkeypatch):
    added = checkout / "megatron/core/transformer/mtp_objective/shift.py"
    for spoil in (lambda: added.write_text("other"), added.unlink):
        spoil()
        _, series = megatron_in(checkout, fork, monkeypatch)
        assert series.state == doctor.WRONG
        assert "mtp_objective/shift.py" in series.detail


def test_an_older_release_is_compared_with_its_port(checkout, fork, monkeypatch):
    (checkout / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 2\n")
    release, series = megatron_in(checkout, fork, monkeypatch)
    assert release.detail.startswith("0.18.2 in")
    assert series.state == doctor.OK and series.detail.startswith("0.18.2+mtp.")


def test_an_unpatched_megatron_is_wrong_with_the_way_to_patch_it(checkout, fork, monkeypatch):
    for path in fork.added_files():
        (checkout / path).unlink(missing_ok=True)
    _, series = megatron_in(checkout, fork, monkeypatch)
    assert series.state == doctor.WRONG
    assert "git am" in series.advice


def test_no_megatron_at_all_is_wrong(tmp_path, fork, monkeypatch):
    (found,) = megatron_in(tmp_path, fork, monkeypatch)
    assert found.state == doctor.WRONG
    assert "make tree" in found.advice


def test_a_package_that_fails_to_import_is_wrong_and_not_merely_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_engine.py").write_text("raise OSError('libcudart.so not found')\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor.installed(doctor.Package("broken-engine", "broken_engine", "install it"))
    assert found.state == doctor.WRONG
    assert "libcudart.so not found" in found.detail


def test_a_package_that_is_not_there_comes_with_the_way_to_install_it():
    found = doctor.installed(doctor.Package("no-such-engine", "no_such_engine", "install it"))
    assert (found.state, found.advice) == (doctor.MISSING, "install it")


def test_a_feature_is_on_with_all_it_needs_and_one_of_each_alternative():
    def states(*there):
        found = [doctor.Finding("packages", name, doctor.OK, "") for name in there]
        return {f.name: f.state for f in doctor.features(found)}

    assert states("transformers")["Hugging Face heads, in and out"] == doctor.MISSING
    assert states("transformers", "safetensors")["Hugging Face heads, in and out"] == doctor.OK
    assert states()["fused Adam"] == doctor.MISSING
    assert states("apex")["fused Adam"] == states("transformer-engine")["fused Adam"] == doctor.OK


def run_doctor(*path: Path, args=("--json",)) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, str(ROOT / "tools" / "doctor.py"), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_the_command_exits_with_0_on_a_patched_tree_and_with_1_on_the_wrong_apex(
    checkout, tmp_path_factory
):
    good = run_doctor(checkout)
    assert good.returncode == 0, good.stderr
    found = {finding["name"]: finding["state"] for finding in json.loads(good.stdout)}
    assert found["torch"] == found["series"] == doctor.OK
    impostor = tmp_path_factory.mktemp("impostor")
    (impostor / "apex").mkdir()
    (impostor / "apex" / "__init__.py").touch()
    bad = run_doctor(checkout, impostor, args=())
    assert bad.returncode == 1
    assert "unrelated web toolkit" in bad.stdout
    assert "must be put right" in bad.stderr
