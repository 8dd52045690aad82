"""Upstream's source distribution: found or fetched, verified, unpacked."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from forklib.errors import ForkError
from forklib.project import Project

OVERRIDE = "MEGATRON_CORE_SDIST"


def sha256(path: Path) -> str:
    """The hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def obtain(project: Project) -> Path:
    """Returns the verified sdist of the pinned release.

    Taken from MEGATRON_CORE_SDIST if set, else from build/sdist, else from the package index.

    Raises:
        ForkError: it cannot be had, or its hash is not the pinned one.
    """
    override = os.environ.get(OVERRIDE)
    if override:
        path = Path(override).expanduser().resolve()
        if path.is_dir():
            path = path / project.base.sdist
        elif project.port:
            # The variable names the sdist of the series; those of the ports lie beside it.
            path = path.with_name(project.base.sdist)
        if not path.is_file():
            raise ForkError(
                f"{OVERRIDE} must name {project.base.sdist}, but {path} is no file."
                " Correct the path, or unset it to download the release."
            )
    else:
        path = project.build / "sdist" / project.base.sdist
        if not path.is_file():
            download(project.base.version, path.parent)
        if not path.is_file():
            names = ", ".join(sorted(p.name for p in path.parent.iterdir())) or "nothing"
            raise ForkError(
                f"expected the package index to serve {project.base.sdist}, but got: {names}."
                f" Correct `sdist` in {project.pin_name}."
            )
    verify(path, project)
    return path


def verify(path: Path, project: Project) -> None:
    """Raises ForkError unless the file has the pinned hash."""
    came = sha256(path)
    if came != project.base.sha256:
        raise ForkError(
            f"sdist hash differs: {project.pin_name} pins {project.base.sha256} for"
            f" {project.base.sdist}, but {path} has {came}. If {project.pin_name} is right, the"
            " file is damaged or is another release: delete it and run again."
        )


def download(version: str, folder: Path) -> Path:
    """Fetches a release's sdist with pip from the configured package index into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # When pip runs setup.py its build environment is on PYTHONPATH; a child must not see it.
    hidden = ("PYTHONPATH", "PYTHONNOUSERSITE", "PIP_REQUIRE_VIRTUALENV")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    print(f"downloading the sdist of megatron-core {version}", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "megatron-core", "--dest", scratch, f"megatron-core=={version}"]
        # pip runs the sdist's setup.py to read its metadata; what that needs is here as a rule.
        for isolation in (["--no-build-isolation"], []):
            done = subprocess.run(command + isolation, env=env, capture_output=True, text=True)
            if done.returncode == 0:
                break
        found = sorted(Path(scratch).glob("*.tar.gz"))
        if done.returncode or not found:
            raise ForkError(
                f"pip could not download the sdist of megatron-core {version}:\n"
                f"{(done.stderr or done.stdout).strip()}\n"
                f"Without network, set {OVERRIDE}=/path/to/megatron_core-{version}.tar.gz."
            )
        return Path(shutil.move(found[0], folder / found[0].name))


def unpack(sdist: Path, target: Path) -> None:
    """Unpacks an sdist so that its top folder becomes `target`, which must not exist."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        tops = list(Path(scratch).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise ForkError(f"expected one top folder in {sdist}, but found {len(tops)} entries.")
        tops[0].rename(target)
