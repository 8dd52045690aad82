"""Megatron's side of a head on disk.

    CKPT/dist/                dist_checkpointing, keys as in a GPTModel: ``mtp.layers.0.…``
    CKPT/mtp_head.json        what is needed to build the layer, and where the head came from
    CKPT/import_report.json   what happened to every tensor, if the head was imported
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import Family
from tools.mtp_checkpoint.served import Served
from tools.mtp_checkpoint.source import HFDirectory

FORMAT_VERSION = 1
DIST, MANIFEST, REPORT = "dist", "mtp_head.json", "import_report.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def manifest(directory: HFDirectory, family: str, layout: str, dtype: torch.dtype) -> dict:
    """What `save_head` writes to mtp_head.json for a head from this checkpoint."""
    return {
        "format_version": FORMAT_VERSION,
        "family": family,
        "layout": layout,
        "dtype": _dtype_name(dtype),
        "source": str(directory.path.resolve()),
        "text_config": directory.text_config,
    }


def read_manifest(checkpoint: str | Path) -> dict[str, Any]:
    """Read mtp_head.json.

    Raises:
        CheckpointError: There is none, it is of another version, or something in it is missing.
    """
    path = Path(checkpoint) / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{checkpoint} has no {MANIFEST}; expected a directory that `import` wrote"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    if found.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} is of version {found.get('format_version')}, this tool reads {FORMAT_VERSION}"
        )
    known = isinstance(found.get("text_config"), dict) and isinstance(found.get("family"), str)
    if not known or found.get("dtype") not in DTYPES:
        raise CheckpointError(
            f"{path}: expected a family, a text_config and a dtype, {' or '.join(DTYPES)}; "
            "import the head again"
        )
    return found


def check_fit(contents: Mapping[str, Any], family: Family, directory: HFDirectory) -> None:
    """Refuse a head of another model.

    Args:
        contents: Of mtp_head.json.
        family: Of the directory.
        directory: What the head is compared with, or exported into.

    Raises:
        CheckpointError: Family or sizes differ.
    """
    if contents["family"] != family.name:
        raise CheckpointError(
            f"the head is of family {contents['family']}, {directory.path} of {family.name}"
        )
    ours = family.dimensions(contents["text_config"])
    theirs = family.dimensions(directory.text_config)
    for letter, size in ours.items():
        if theirs[letter] != size:
            raise CheckpointError(
                f"the head has {family.dims[letter]} {size}, {directory.path} has {theirs[letter]}"
            )


def save_head(head: torch.nn.Module, checkpoint: str | Path, contents: Mapping[str, Any]) -> None:
    """Write a head; every rank calls it.

    Args:
        head: A NativeHead.
        checkpoint: A new or empty directory on a disk that all ranks share.
        contents: Of mtp_head.json: `manifest`, or what `read_manifest` returned. The dtype is the
            head's own, whatever it says.
    """
    from tools.mtp_checkpoint import streaming

    checkpoint = Path(checkpoint)
    if dist.get_rank() == 0:
        (checkpoint / DIST).mkdir(parents=True)
        write_json(checkpoint / MANIFEST, {**contents, "dtype": _dtype_name(head.dtype)})
    dist.barrier()
    free = shutil.disk_usage(checkpoint).free / 1e9  # Megatron's writer drops the system's words
    with _clear_errors(f"{checkpoint} cannot be written, its disk has {free:.2f} GB free"):
        streaming.save(head, checkpoint / DIST)
    dist.barrier()


def load_head(
    checkpoint: str | Path,
    *,
    groups: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    implementation: str = "local",
    served: Served | None = None,
) -> torch.nn.Module:
    """Build the head of a checkpoint and load it, whatever expert-parallel size wrote it.

    Args:
        checkpoint: A directory that `save_head` wrote.
        groups: Process groups; None takes Megatron's global ones.
        dtype: Of the head; None takes the checkpoint's.
        device: As for `build_mtp_block`.
        implementation: "local" or "te".
        served: How often the layer is run, and on what; None takes what the checkpoint says.

    Returns:
        A NativeHead.

    Raises:
        CheckpointError: Something is missing in the checkpoint, or not a number.
    """
    from tools.mtp_checkpoint import streaming
    from tools.mtp_checkpoint.native.layer import build_mtp_block

    found = read_manifest(checkpoint)
    head = build_mtp_block(
        found["text_config"],
        groups=groups,
        dtype=DTYPES[found["dtype"]] if dtype is None else dtype,
        device=device,
        implementation=implementation,
        served=Served.read(found) if served is None else served,
    )
    with _clear_errors(f"{checkpoint} cannot be loaded"):
        streaming.load(head, Path(checkpoint) / DIST)
    tensors = {name: t for name, t in head.state_dict().items() if torch.is_tensor(t)}
    empty = [name for name, tensor in tensors.items() if tensor.isnan().any()]
    if empty:
        raise CheckpointError(f"{checkpoint} holds NaN in {empty[0]} ({len(empty)} tensors)")
    return head


def write_json(path: Path, contents: Any) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(contents, indent=2, default=str) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _clear_errors(what: str) -> Iterator[None]:
    """Say in one line what went wrong below: torch reports ranks' errors as pages of traceback."""
    try:
        yield
    except CheckpointException as error:  # a BaseException, so that nobody catches it by chance
        rank, (reason, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: {_one_line(reason)} (rank {rank})") from error
    except Exception as error:
        raise CheckpointError(f"{what}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"


def _dtype_name(dtype: torch.dtype) -> str:
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise CheckpointError(f"a head is stored in {' or '.join(DTYPES)}, not in {dtype}")
