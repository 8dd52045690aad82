"""The files of a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tools.tiny_checkpoint import target, tokens, weights
from tools.tiny_checkpoint.family import Sizes, TinyFamily

_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}  # in config.json


def write(
    directory: Path,
    family: TinyFamily,
    layout: str,
    dtype: str,
    sizes: Sizes,
    seed: int,
    train_steps: int,
) -> None:
    """Write all files of a checkpoint into a directory; the arguments are those of `make`."""
    tokenizer = tokens.train_tokenizer(sizes.vocab)
    ids = tokens.save_tokenizer(tokenizer, directory)
    config = family.model_config(sizes, ids)
    head = weights.random_head(family.head_shapes(sizes, layout), family.zero_centred, seed)
    if family.target is None:
        rest = target.skeleton_tensors(sizes, seed)
        _share_copies(head, rest)
    else:
        model = target.build_target(family, config, seed)
        if train_steps:
            stream = tokenizer("\n".join(tokens.sections().values()))["input_ids"]
            target.train_target(model, torch.tensor(stream), train_steps, seed=seed)
        rest = target.target_tensors(model, layout)
    weights.write_shards(directory, _split(head, rest, _TORCH_DTYPES[dtype]))
    named = {"architectures": [family.architecture], "dtype": _DTYPE_NAMES[dtype]}
    _write_json(directory / "config.json", named | config)
    stop = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    generation = {"eos_token_id": stop, "pad_token_id": ids["<|endoftext|>"], "do_sample": False}
    _write_json(directory / "generation_config.json", generation)


def _share_copies(head: dict[str, torch.Tensor], rest: dict[str, torch.Tensor]) -> None:
    """Make the head's embedding and output layer, where a family stores them, the target's."""
    for key in head:
        if key.endswith(".embed_tokens.weight"):
            head[key] = rest["model.embed_tokens.weight"]
        elif key.endswith(".shared_head.head.weight"):
            head[key] = rest["lm_head.weight"]


def _split(
    head: dict[str, torch.Tensor], rest: dict[str, torch.Tensor], dtype: torch.dtype
) -> list[dict[str, torch.Tensor]]:
    """Three shards: two share the target, the last two the head, so one holds some of both."""
    head_keys, rest_keys = list(head), list(rest)
    groups = (
        rest_keys[: len(rest_keys) // 2],
        rest_keys[len(rest_keys) // 2 :] + head_keys[: len(head_keys) // 2],
        head_keys[len(head_keys) // 2 :],
    )
    whole = rest | head
    return [{key: whole[key].to(dtype, copy=True).contiguous() for key in g} for g in groups]


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
