"""Put a tiny checkpoint together."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import torch

from tools.tiny_checkpoint import target, tokens, weights
from tools.tiny_checkpoint.families import FAMILIES
from tools.tiny_checkpoint.family import Sizes, TinyFamily

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


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
        experts: Number of routed experts, at least 2.
        vocab: Tokens, at least 263.
        train_steps: Steps for which the target (not the head) learns Python's manual: its
            argmax then carries signal. 200 take about 15 s on a quiet core, and bring its cross
            entropy from 6.6 to 3.4 nats (a unigram model has 5.7).

    Returns:
        The directory.

    Raises:
        FileExistsError: ``out`` exists.
        ValueError: An argument outside what is said above.
    """
    out = Path(out)
    shape, layout = _checked(family, layout, dtype, hidden, experts, train_steps)
    if out.exists():
        raise FileExistsError(f"{out} exists; name a directory that does not")
    sizes = Sizes(hidden=hidden, experts=experts, vocab=vocab)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write(partial, shape, layout, DTYPES[dtype], sizes, seed, train_steps)
        partial.chmod(0o755)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


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


def _write(
    directory: Path,
    family: TinyFamily,
    layout: str,
    dtype: torch.dtype,
    sizes: Sizes,
    seed: int,
    train_steps: int,
) -> None:
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
    weights.write_shards(directory, _split(head, rest, dtype))
    named = {"architectures": [family.architecture], "dtype": str(dtype).removeprefix("torch.")}
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
