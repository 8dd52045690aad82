"""`pip install .` gives the patched release under its own version, and nothing more or less."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from forklib import native, project, sdist
from forklib.errors import ForkError
from forklib.git import Repo

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("fork.toml", "patches", "ports", "setup.py", "pyproject.toml", "tools")


def wheel_of(copy: Path, out: Path, **extra: str) -> Path:
    """Builds a wheel in a copy of what setup.py needs."""
    for name in NEEDED:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    env = os.environ | {"MEGATRON_CORE_SDIST": str(sdist.obtain(project.load(ROOT)))} | extra
    env.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--disable-pip-version-check", "--wheel-dir", str(out)]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.iterdir()
    return wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """A copy of what setup.py needs, in which a wheel was built: (copy, wheel)."""
    copy = tmp_path_factory.mktemp("copy")
    return copy, wheel_of(copy, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_is_the_patched_release_under_its_own_version(built):
    version = project.load(ROOT).version
    with zipfile.ZipFile(built[1]) as wheel:
        (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        head = wheel.read(metadata).decode().split("\n\n")[0].split("\n")
    assert "Name: megatron-core" in head
    assert f"Version: {version}" in head and version.endswith("+mtp.1")
    assert "Requires-Dist: torch>=2.6.0" in head


@pytest.mark.slow
def test_the_wheels_files_equal_those_of_the_pinned_tree(built):
    copy, path = built
    repo = Repo(copy / "build" / "dist" / "tree")
    fork = project.load(ROOT)
    assert repo.tree_of("HEAD") == fork.pinned_tree
    tree = repo.files_of("HEAD")
    expected = {name for name in tree if name.startswith("megatron/")}
    expected.add(native.target(Path(".")).as_posix())
    with zipfile.ZipFile(path) as wheel:
        came = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert came == expected
        for name in came & set(tree):
            assert wheel.read(name) == (repo.path / name).read_bytes(), name


@pytest.mark.slow
def test_the_build_leaves_everything_below_build(built):
    assert {path.name for path in built[0].iterdir()} <= {*NEEDED, "build"}


@pytest.mark.slow
def test_a_port_is_built_when_it_is_asked_for(tmp_path):
    version = project.port_versions(ROOT)[0]
    port = project.load(ROOT, version)
    try:
        shutil.copytree(sdist.obtain(port).parent, tmp_path / "sdists")
    except ForkError as reason:
        pytest.skip(str(reason))
    (tmp_path / "copy").mkdir()
    wheel = wheel_of(
        tmp_path / "copy",
        tmp_path / "wheel",
        MTP_PORT=version,
        MEGATRON_CORE_SDIST=str(tmp_path / "sdists"),
    )
    assert wheel.name.startswith(f"megatron_core-{version}+mtp.")
    repo = Repo(tmp_path / "copy" / "build" / "dist" / "tree")
    assert repo.tree_of("HEAD") == port.pinned_tree
