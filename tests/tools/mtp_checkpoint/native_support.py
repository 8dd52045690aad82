"""Tiny checkpoints, heads imported from them, and inputs, for the tests of the native layer."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.device import device
from tools.mtp_checkpoint.importing import import_head
from tools.mtp_checkpoint.native.layer import NativeHead, build_mtp_block
from tools.mtp_checkpoint.reference import ReferenceHead
from tools.mtp_checkpoint.source import HFDirectory
from tools.tiny_checkpoint import make

_scratch = tempfile.TemporaryDirectory(prefix="tiny-checkpoints-")  # until the process ends


@dataclasses.dataclass(frozen=True)
class Kind:
    """What `directory` makes."""

    family: str = "qwen3_5_moe"
    layout: str = "per-expert"
    dtype: str = "fp32"

    def __str__(self) -> str:
        return f"{self.family}, {self.layout}, {self.dtype}"


@functools.cache
def directory(kind: Kind) -> HFDirectory:
    """The tiny checkpoint, made once per process."""
    out = Path(_scratch.name) / str(kind).replace(", ", "-")
    make(out, family=kind.family, layout=kind.layout, dtype=kind.dtype)
    return HFDirectory.open(out)


@functools.cache
def reference(kind: Kind) -> ReferenceHead:
    """Its head in float32, by transformers. Shared: do not change it."""
    return ReferenceHead.from_directory(directory(kind))


def imported(kind: Kind, groups: Any, dtype: torch.dtype = torch.float32) -> NativeHead:
    """Its head, built on the test's device and filled."""
    source = directory(kind)
    head = build_mtp_block(source.config, groups=groups, dtype=dtype, device=device())
    import_head(source, head, groups)
    return head


def hidden_states(head: NativeHead, kind: Kind, ids_BS, positions_BS, hidden_BSH) -> torch.Tensor:
    """What the head makes of inputs on the CPU: [B, S, H], on the CPU."""
    embedding_VH = reference(kind).embedding_VH.to(device())
    out_SBH = head(
        ids_BS.to(device()),
        positions_BS.to(device()),
        hidden_BSH.transpose(0, 1).to(device()),
        lambda ids: torch.nn.functional.embedding(ids, embedding_VH),
    )
    return out_SBH.transpose(0, 1).cpu()


def inputs(batch: int = 4, length: int = 24, hidden: int = 64, vocab: int = 768, seed: int = 0):
    """Random token ids [B, S], positions [B, S] and hidden states [B, S, H]."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(vocab, (batch, length), generator=generator)
    hidden_BSH = torch.randn(batch, length, hidden, generator=generator)
    return ids_BS, torch.arange(length).expand(batch, length), hidden_BSH
