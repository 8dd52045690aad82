"""Copies of checkpoint directories with one thing wrong, and what tells two of them apart."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.families import detect
from tools.mtp_checkpoint.inspecting import inspect_directory
from tools.mtp_checkpoint.source import HFDirectory

INDEX = "model.safetensors.index.json"


def copy_of(directory: Path, out: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(directory, out))


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file, by name."""
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of all shards."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def file_of(directory: Path, key: str) -> Path:
    """The shard that holds a tensor."""
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][key]


def set_tensor(directory: Path, key: str, tensor: torch.Tensor | None, beside: str = "") -> None:
    """Replace, add (to the shard that holds ``beside``) or, with None, remove a tensor."""
    index = json.loads((directory / INDEX).read_text())
    file = directory / index["weight_map"][beside or key]
    contents = load_file(file)
    contents.pop(key, None)
    index["weight_map"].pop(key, None)
    if tensor is not None:
        contents[key] = tensor.contiguous()
        index["weight_map"][key] = file.name
    save_file(contents, file, metadata={"format": "pt"})
    (directory / INDEX).write_text(json.dumps(index))


def set_config(directory: Path, **fields) -> None:
    """Change fields of the text configuration."""
    config = json.loads((directory / "config.json").read_text())
    config.get("text_config", config).update(fields)
    (directory / "config.json").write_text(json.dumps(config))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same to the bit, the sign of zero included."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def refusal(directory: Path) -> str:
    """What inspect finds and open or check refuse: the two must agree."""
    found = inspect_directory(directory).problems
    with pytest.raises(CheckpointError) as refused:
        opened = HFDirectory.open(directory)
        detect(opened).check(opened)
    assert set(refused.value.problems) <= set(found)
    return "\n".join(found)
