"""A Hugging Face checkpoint directory, checked from headers alone and read tensor by tensor.

Only safetensors is read. Nothing is ever unpickled, and nothing here writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.headers import Header, TensorInfo, read_header
from tools.mtp_checkpoint.pickles import find_pickles

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SCALES = ("weight_scale_inv", "weight_scale", "input_scale", "qweight", "qzeros", "scales")


@dataclass(frozen=True)
class HFDirectory:
    """A directory whose headers have been read; make one with `open` or `scan`.

    Attributes:
        path: The directory.
        config: Contents of config.json.
        tensors: Every tensor of every shard, by key.
        headers: Every shard's header, by file name.
        index: Contents of the index, or None for a single file.
        ignored: Pickles that are no weights of the model, such as a trainer's state: never opened.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    headers: dict[str, Header]
    index: dict[str, Any] | None
    ignored: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> HFDirectory:
        """Read and check all headers.

        Raises:
            CheckpointError: With everything that `scan` finds.
        """
        directory, problems = cls.scan(path)
        if problems:
            raise CheckpointError(*problems)
        return directory

    @classmethod
    def scan(cls, path: str | Path) -> tuple[HFDirectory, list[str]]:
        """Read all headers and return what could be read, and every problem found.

        Raises:
            CheckpointError: There is no directory or no config.json to begin with.
        """
        path = Path(path)
        config = _read_json(path, "config.json", path.is_dir())
        weights, ignored = find_pickles(path)
        problems = [*_pickled(weights), *_broken_links(path), *_quantisation(config)]
        index = _read_json(path, INDEX, True) if (path / INDEX).exists() else None
        if index is not None:
            _check_index(path / INDEX, index)
        headers, unreadable = _read_headers(path, index)
        tensors, doubled = _collect(headers)
        problems += unreadable + doubled
        if not unreadable:
            problems += _disagreements(index, tensors)
        scaled = sorted(key for key in tensors if key.rpartition(".")[2] in _SCALES)
        if scaled and "quantization_config" not in config:
            problems.append(_quantised(f"it has {len(scaled)} scales such as {scaled[0]}"))
        return cls(path, config, tensors, headers, index, ignored), problems

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the configuration that describes the language model."""
        return text_config_of(self.config)

    def read(self, key: str) -> torch.Tensor:
        """Return one tensor, on the CPU, in its own dtype.

        The file is opened for this tensor alone: the pages it maps go when the tensor does.
        """
        with safe_open(self.path / self.tensors[key].file, framework="pt") as file:
            return file.get_tensor(key)

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return rows ``start`` to ``stop`` of the first dimension, and read nothing else."""
        with safe_open(self.path / self.tensors[key].file, framework="pt") as file:
            return file.get_slice(key)[start:stop]


def text_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json, nested or flat."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """The torch dtype of a tensor that can be imported.

    Raises:
        CheckpointError: It is none of float32, bfloat16 and float16.
    """
    if info.dtype not in DTYPES:
        raise CheckpointError(dtype_problem(info))
    return DTYPES[info.dtype]


def dtype_problem(info: TensorInfo) -> str:
    """Say that a tensor's dtype cannot be imported."""
    return f"{info.key} is {info.dtype}; expected one of {', '.join(DTYPES)}"


def _read_json(path: Path, name: str, is_directory: bool) -> dict[str, Any]:
    if not is_directory:
        raise CheckpointError(f"{path}: expected the directory of a Hugging Face checkpoint")
    try:
        contents = json.loads((path / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no {name}; is it a checkpoint directory?") from error
    except ValueError as error:
        raise CheckpointError(f"{path / name} is not JSON: {error}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path / name}: expected a JSON object")
    return contents


def _pickled(weights: tuple[str, ...]) -> list[str]:
    if not weights:
        return []
    return [
        f"pickled weights are refused, and were not opened: {', '.join(weights[:3])}. Only "
        "safetensors is read; convert them, or move them out of the directory"
    ]


def _broken_links(path: Path) -> list[str]:
    """Files of a hub's cache are links; what they point to can have been removed."""
    found = sorted(
        str(file.relative_to(path))
        for file in path.rglob("*")
        if file.is_symlink() and not file.exists()
    )
    if not found:
        return []
    return [f"broken links: {', '.join(found[:3])} ({len(found)} in all); download them again"]


def _check_index(path: Path, index: dict[str, Any]) -> None:
    found = index.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(f"{path}: expected a weight_map from keys to names of files")
    if not isinstance(index.get("metadata") or {}, dict):
        raise CheckpointError(f"{path}: expected metadata to be a JSON object")


def _quantised(how: str) -> str:
    return (
        f"the checkpoint is quantised: {how}. A head is trained in float32 or bfloat16; use the "
        "unquantised release of the model"
    )


def _quantisation(config: dict[str, Any]) -> list[str]:
    nested = text_config_of(config)
    found = config.get("quantization_config") or nested.get("quantization_config")
    if not found:
        return []
    method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
    return [_quantised(f"config.json has a quantization_config (method {method})")]


def _read_headers(path: Path, index: dict | None) -> tuple[dict[str, Header], list[str]]:
    """Headers of all shards, listed or not: a file beside the index could hold a stale copy."""
    files = [file for file in path.rglob("*.safetensors") if file.is_file()]
    names = {str(file.relative_to(path)) for file in files}
    listed = set(index["weight_map"].values()) if index is not None else set()
    problems = [f"{name} is in the index but not in the directory" for name in listed - names]
    problems = [f"{problem}; download it again" for problem in sorted(problems)]
    if index is None and not names:
        return {}, ["there are no .safetensors files; only safetensors is read"]
    if index is None and len(names) > 1:
        problems.append(f"{len(names)} .safetensors files but no {INDEX}")
    headers = {}
    for name in sorted(names):
        try:
            headers[name] = read_header(path / name, name)
        except CheckpointError as error:
            problems += error.problems
    return headers, problems


def _collect(headers: dict[str, Header]) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors: dict[str, TensorInfo] = {}
    problems = []
    for header in headers.values():
        for info in header.tensors:
            first = tensors.setdefault(info.key, info)
            if first is not info:
                problems.append(f"{info.key} is in both {first.file} and {info.file}")
    return tensors, problems


def _disagreements(index: dict | None, tensors: dict[str, TensorInfo]) -> list[str]:
    """Where the index and the headers differ."""
    if index is None:
        return []
    listed = index["weight_map"]
    problems = [
        f"{key} is in the index, for {file}, but not in that file"
        for key, file in sorted(listed.items())
        if key not in tensors or tensors[key].file != file
    ]
    problems += [
        f"{key} is in {info.file} but not in the index"
        for key, info in sorted(tensors.items())
        if key not in listed
    ]
    return problems
