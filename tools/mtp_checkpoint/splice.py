"""Rewrite one safetensors file with some tensors replaced, streamed.

The library writes a file from tensors that are all in memory; a shard of five gigabytes of which
one per cent changes is copied here range by range instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.headers import Header, TensorInfo, write_header

_CHUNK = 16 << 20  # bytes


@dataclass(frozen=True)
class Output:
    """One tensor of the new file.

    Attributes:
        key: Its name.
        dtype: As the format writes it.
        shape: Its shape.
        nbytes: Its length in bytes.
        source: Where its bytes are in the old file; None for a new tensor.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: TensorInfo | None = None

    @classmethod
    def kept(cls, info: TensorInfo) -> Output:
        """A tensor whose bytes are copied."""
        return cls(info.key, info.dtype, info.shape, info.nbytes, info)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        count = 1
        for size in self.shape:
            count *= size
        return self.nbytes // count if count else 1


def in_order(outputs: list[Output], header: Header) -> list[Output]:
    """Return the order in which the file holds these tensors, wide dtypes first if it is a new one.

    Tensors lie back to back, so one of float32 after an odd number of bfloat16 would not be
    aligned. An unchanged list keeps its order, and with it the file its bytes.
    """
    if _is_unchanged(outputs, header):
        return outputs
    return sorted(outputs, key=lambda output: -output.itemsize)


def splice(
    old: Path,
    header: Header,
    new: Path,
    outputs: list[Output],
    content: Callable[[str], Iterator[memoryview]],
    advance: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Write ``new`` from ``old``.

    Args:
        old: The file to copy from; only read.
        header: Its header.
        new: The file to write.
        outputs: All tensors of the new file, in the order of `in_order`.
        content: Gives the bytes of a new tensor by key, in parts.
        advance: Called with the number of bytes after each part.

    Raises:
        CheckpointError: ``content`` gave another number of bytes than announced.
    """
    raw = header.raw
    if not _is_unchanged(outputs, header):
        described = [(o.key, o.dtype, o.shape, o.nbytes) for o in outputs]
        raw = write_header(described, header.metadata)
    with open(old, "rb") as source, open(new, "wb") as target:
        target.write(raw)
        for output in outputs:
            before = target.tell()
            parts = content(output.key) if output.source is None else ranges(source, output.source)
            for part in parts:
                target.write(part)
                advance(len(part))
            if (written := target.tell() - before) != output.nbytes:
                raise CheckpointError(
                    f"{output.key}: {written} bytes were written, expected {output.nbytes}"
                )


def ranges(file, info: TensorInfo) -> Iterator[bytes]:
    """The bytes of a tensor, from a file open for reading, in parts."""
    file.seek(info.start)
    left = info.nbytes
    while left:
        part = file.read(min(_CHUNK, left))
        if not part:
            raise CheckpointError(f"{info.file} has become shorter while {info.key} was read")
        left -= len(part)
        yield part


def _is_unchanged(outputs: list[Output], header: Header) -> bool:
    """Whether the file will hold what it holds, so that its header can stay as it is."""
    ours = [(o.key, o.dtype, o.shape) for o in outputs]
    return ours == [(info.key, info.dtype, info.shape) for info in header.tensors]
