"""Random weights of a sensible scale, and the shards they are written to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.tiny_checkpoint.family import Shapes


def random_tensor(
    key: str, shape: tuple[int, ...], zero_centred: bool, generator: torch.Generator
) -> torch.Tensor:
    """A float32 tensor whose values make mistakes visible.

    Matrices keep the variance of their input. Norm weights differ clearly from each other, and w
    from 1 + w: they are ``0.3 · N(0, 1)``, plus 1 where the norm is not zero-centred.
    """
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise * shape[-1] ** -0.5
    is_norm = "norm" in key
    return 0.3 * noise + (1.0 if is_norm and not zero_centred else 0.0)


def random_head(shapes: Shapes, zero_centred: bool, seed: int) -> dict[str, torch.Tensor]:
    """The head's tensors in float32.

    A packed tensor holds the same experts as its per-expert form would: experts are always drawn
    one by one, so that a seed means the same head in both layouts.
    """
    tensors = {}
    for key, shape in shapes.items():
        if ".experts." not in key:
            generator = torch.Generator().manual_seed(_seed(seed, key))
            tensors[key] = random_tensor(key, shape, zero_centred, generator)
    for key, shape in shapes.items():
        if ".experts." in key:
            tensors[key] = _expert_tensor(key, shape, zero_centred, seed)
    return {key: tensors[key] for key in shapes}


def _expert_tensor(key: str, shape: tuple[int, ...], zero_centred: bool, seed: int):
    def one(expert: int, name: str, one_shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_seed(seed, f"expert {expert} {name}"))
        return random_tensor(name, one_shape, zero_centred, generator)

    tail = key.split(".experts.", 1)[1]
    if tail == "gate_up_proj":
        count, both, hidden = shape
        return torch.stack(
            [
                torch.cat([one(e, name, (both // 2, hidden)) for name in ("gate_proj", "up_proj")])
                for e in range(count)
            ]
        )
    if tail == "down_proj":
        return torch.stack([one(e, "down_proj", shape[1:]) for e in range(shape[0])])
    expert, name, _ = tail.split(".")
    return one(int(expert), name, shape)


def _seed(seed: int, key: str) -> int:
    """A seed of its own for every key, so that adding one leaves the others as they are."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:7], "big")


def write_shards(directory: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    """Write the shards and ``model.safetensors.index.json`` as Hugging Face names them."""
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    size = sum(t.numel() * t.element_size() for tensors in shards for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
