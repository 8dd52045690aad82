"""Check what is asked for, and make it under another name until it is whole."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tools.tiny_checkpoint.families import FAMILIES
from tools.tiny_checkpoint.family import DTYPES, Sizes, TinyFamily


def make(
    out: str | os.PathLike,
    *,
    layout: Literal["per-expert", "packed"] | None = None,
    dtype: Literal["bf16", "fp32"] = "bf16",
    family: str = "qwen3_5_moe",
    seed: int = 0,
    hidden: int = 64,
    experts: int = 8,
    vocab: int = 768,
    train_steps: int = 0,
) -> Path:
    """Write a tiny checkpoint directory; the same arguments give the same bytes.

    (A trained target differs between machines and thread counts, in the last bits.)

    It holds config.json, generation_config.json, the tokenizer with its chat template, three
    shards (the head's keys lie in the last two) and their index. The directories of the Qwen
    families load with transformers; those of "deepseek_v3" and "mimo" hold a complete head and
    of the target only embedding, final norm and output layer.

    Args:
        out: Directory to make. It must not exist.
        layout: How experts are stored, "per-expert" or "packed"; None takes the family's first.
            A seed means the same model in both.
        dtype: Of every tensor.
        family: A key of `tools.tiny_checkpoint.families.FAMILIES`.
        seed: Of all weights.
        hidden: Hidden size, a multiple of 8.
        experts: Number of routed experts, even.
        vocab: Tokens, at least 263.
        train_steps: Steps for which the target (not the head) learns Python's manual: its
            argmax then carries signal. 200 take about 15 s on a quiet core, and bring its cross
            entropy from 6.7 to 3.3 nats (a unigram model has 5.7).

    Returns:
        The directory.

    Raises:
        FileExistsError: ``out`` exists.
        ValueError: An argument outside what is said above.
        OSError: The disk is full, or cannot be written; nothing is left of it.
    """
    out = Path(out)
    shape, layout = _checked(family, layout, dtype, hidden, experts, train_steps)
    if out.exists():
        raise FileExistsError(f"{out} exists; name a directory that does not")
    from tools.tiny_checkpoint.writing import write  # torch, which `--help` does without

    sizes = Sizes(hidden=hidden, experts=experts, vocab=vocab)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        with _disk_errors(out):
            write(partial, shape, layout, dtype, sizes, seed, train_steps)
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


@contextlib.contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """Libraries in Rust report a full disk as errors of their own: make them OSError again."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"{out} cannot be written: {reason}") from error
    except Exception as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(found[1])
            raise OSError(number, f"{out} cannot be written: {os.strerror(number)}") from error
        raise


def _checked(
    family: str, layout: str | None, dtype: str, hidden: int, experts: int, train_steps: int
) -> tuple[TinyFamily, str]:
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {', '.join(FAMILIES)}, got {family!r}")
    shape = FAMILIES[family]
    layout = layout or shape.layouts[0]
    if layout not in shape.layouts:
        raise ValueError(
            f"layout: {family} has {' or '.join(shape.layouts)}, got {layout!r}; leave it out "
            "for the first of these"
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if hidden < 8 or hidden % 8:
        raise ValueError(f"hidden: expected a positive multiple of 8, got {hidden}")
    if experts < 2 or experts % 2:
        raise ValueError(f"experts: expected an even number of at least 2, got {experts}")
    if train_steps < 0 or (train_steps and shape.target is None):
        raise ValueError(
            f"train_steps: expected 0 or, for a family with a whole target, a positive number; "
            f"got {train_steps} for {family}"
        )
    return shape, layout
