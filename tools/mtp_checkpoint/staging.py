"""A directory that appears under its name only when everything in it is there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tools.mtp_checkpoint.errors import CheckpointError


def check_destination(out: Path, *sources: Path) -> None:
    """Refuse a destination that cannot be a new directory apart from the sources.

    Raises:
        CheckpointError: It exists, its parent does not, or it lies inside a source.
    """
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists; nothing is overwritten. Name another output")
    if not out.absolute().parent.is_dir():
        raise CheckpointError(f"{out.absolute().parent} does not exist; make it first")
    for source in sources:
        if out.absolute().parent.resolve().is_relative_to(source.resolve()):
            raise CheckpointError(f"{out} lies inside {source}, which is left untouched")


def check_space(out: Path, nbytes: int) -> None:
    """Refuse to begin what cannot fit.

    Raises:
        CheckpointError: The disk has less than ``nbytes`` free.
    """
    parent = out.absolute().parent
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise CheckpointError(
            f"{parent} has {free / 1e9:.2f} GB free, {nbytes / 1e9:.2f} GB are needed"
        )


@contextlib.contextmanager
def staged(out: Path, owner: bool = True, token: str | None = None) -> Iterator[Path]:
    """Yield a temporary directory beside ``out``; rename it to ``out`` if the block ends well.

    Whatever ends the block otherwise, an interrupt included, removes it. Only a kill that no
    process can see leaves it behind, under a name that says so.

    Args:
        out: The final name, on the same disk.
        owner: Whether this process creates, renames and removes. Others only get the name.
        token: Makes the name the same for all ranks; None takes the process id.

    Raises:
        CheckpointError: Something has taken the name meanwhile.
    """
    temporary = out.absolute().parent / f".{out.name}.{token or os.getpid()}.partial"
    if not owner:
        yield temporary
        return
    temporary.mkdir()
    try:
        yield temporary
        if out.exists():
            raise CheckpointError(f"{out} has appeared meanwhile; nothing is overwritten")
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
