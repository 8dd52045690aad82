"""The header of a safetensors file: what is in it and where, without reading a tensor.

The library checks the file; what it does not give away are the offsets, which splicing needs.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tools.mtp_checkpoint.errors import CheckpointError

_LENGTH = struct.Struct("<Q")  # the file begins with the length of its JSON header in bytes
_LONGEST = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file.

    Attributes:
        key: Its name.
        shape: Its shape.
        dtype: As the format writes it, for example ``"BF16"``.
        file: Name of the file, relative to the checkpoint directory.
        start: First byte, counted from the start of the file.
        nbytes: Length in bytes.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A file's header.

    Attributes:
        metadata: The text annotations, or None when the file has none.
        tensors: In the order in which their bytes lie in the file.
        raw: The first bytes of the file, up to the first tensor.
    """

    metadata: dict[str, str] | None
    tensors: tuple[TensorInfo, ...]
    raw: bytes


def read_header(path: Path, name: str) -> Header:
    """Read and check the header of one file.

    Args:
        path: The file.
        name: How errors and `TensorInfo.file` call it.

    Raises:
        CheckpointError: It is cut off, is no safetensors file, or names a tensor twice.
    """
    raw = _raw_header(path, name)
    try:
        pairs = json.loads(raw[_LENGTH.size :], object_pairs_hook=_Pairs)
    except ValueError as error:
        raise CheckpointError(f"{name}: not a safetensors file, its header is no JSON") from error
    if not isinstance(pairs, _Pairs):
        raise CheckpointError(f"{name}: not a safetensors file, its header is no JSON object")
    counts = Counter(key for key, _ in pairs)
    if doubled := sorted(key for key, count in counts.items() if count > 1):
        raise CheckpointError(f"{name}: the header names {', '.join(doubled[:3])} more than once")
    _check_with_the_library(path, name)
    entries = {key: dict(value) for key, value in pairs}
    metadata = entries.pop("__metadata__", None)
    tensors = [
        TensorInfo(
            key,
            tuple(entry["shape"]),
            entry["dtype"],
            name,
            len(raw) + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for key, entry in entries.items()
    ]
    tensors.sort(key=lambda info: (info.start, info.nbytes))
    return Header(metadata, tuple(tensors), raw)


def write_header(tensors: list[tuple[str, str, tuple[int, ...], int]], metadata) -> bytes:
    """Return the first bytes of a file that holds these tensors in this order.

    Args:
        tensors: Key, dtype, shape and length in bytes of each.
        metadata: Text annotations, or None.
    """
    entries: dict = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for key, dtype, shape, nbytes in tensors:
        entries[key] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the first tensor
    return _LENGTH.pack(len(text)) + text


class _Pairs(list):
    """A JSON object as pairs, so that a name that comes twice is seen."""


def _raw_header(path: Path, name: str) -> bytes:
    """The header's bytes, length included."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = file.read(_LENGTH.size)
        if len(length) < _LENGTH.size:
            raise CheckpointError(f"{name}: truncated, it has only {size} bytes")
        (count,) = _LENGTH.unpack(length)
        if count > min(_LONGEST, size - _LENGTH.size):
            raise CheckpointError(
                f"{name}: not a whole safetensors file: its header should take {count} bytes, "
                f"the file has {size}. Download it again"
            )
        raw = length + file.read(count)
    return raw


def _check_with_the_library(path: Path, name: str) -> None:
    """Let safetensors itself find the file whole: offsets, shapes, dtypes, length."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise CheckpointError(
            f"{name}: truncated or not a safetensors file ({error}); it has "
            f"{path.stat().st_size} bytes. Download it again"
        ) from error
