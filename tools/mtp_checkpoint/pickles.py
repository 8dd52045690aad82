"""Pickles in a checkpoint directory: told apart by their names, and never opened."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHTS = ("pytorch_model*.bin", "adapter_model*.bin")  # what transformers and peft load by name


def find_pickles(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The pickles under a directory, relative to it: the model's weights, and all others.

    Weights are what transformers would load: files that are called as it calls them, and those an
    index names. Where there are no safetensors at all, every pickle counts as weights. Others are
    what a trainer leaves beside them (optimizer.pt, scheduler.pt, rng_state.pth, training_args.bin)
    and formats of other programs.
    """
    found = sorted(
        str(file.relative_to(path))
        for file in path.rglob("*")
        if file.suffix.lower() in _SUFFIXES and not file.is_dir()
    )
    if not any(path.rglob("*.safetensors")):
        return tuple(found), ()
    named = _named_by_an_index(path) if found else set()
    weights = tuple(name for name in found if name in named or _is_called_weights(name))
    return weights, tuple(name for name in found if name not in weights)


def _is_called_weights(name: str) -> bool:
    base = name.rpartition("/")[2].lower()
    return any(fnmatch.fnmatchcase(base, pattern) for pattern in _WEIGHTS)


def _named_by_an_index(path: Path) -> set[str]:
    names: set[str] = set()
    for file in path.glob("*.index.json"):
        try:
            weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
            names.update(name for name in weight_map.values() if isinstance(name, str))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # the index of the safetensors has checks of its own
    return names
