"""The target model: a transformers model with random, or briefly trained, weights."""

from __future__ import annotations

import math
from typing import Any

import torch

from tools.tiny_checkpoint.family import Sizes, TinyFamily

_PEAK_LR = 1e-2  # high for Adam, right for a model this small


def build_target(family: TinyFamily, config: dict[str, Any], seed: int) -> Any:
    """The target in float32, seeded, with norm weights that are not zero.

    Leaves torch's global generator as it found it.
    """
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in family.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**config))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 and "norm" in name and "visual" not in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def train_target(
    model: Any, token_ids: torch.Tensor, steps: int, *, seed: int, batch: int = 16, length: int = 64
) -> list[float]:
    """Train the target to predict a token stream, so that its argmax says something.

    Args:
        model: Of `build_target`; trained in place.
        token_ids: int64 [n], n > ``length``.
        steps: AdamW steps, with warm-up and cosine decay.
        seed: Of the windows drawn.

    Returns:
        The mean cross entropy of every step, in nats per token.
    """
    from tqdm import tqdm

    parameters = [p for name, p in model.named_parameters() if "visual" not in name]
    optimizer = torch.optim.AdamW(parameters, lr=_PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    warmup = max(1, min(20, steps // 5))
    losses = []
    model.train()
    for step in tqdm(range(steps), desc="target", leave=False, disable=None):
        scale = min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = _PEAK_LR * scale
        starts = torch.randint(len(token_ids) - length, (batch,), generator=generator)
        rows_BS = torch.stack([token_ids[start : start + length] for start in starts.tolist()])
        loss = model(input_ids=rows_BS, labels=rows_BS).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def target_tensors(model: Any, layout: str) -> dict[str, torch.Tensor]:
    """The target's tensors under checkpoint keys, its experts in ``layout``."""
    tensors = {}
    for key, tensor in model.state_dict().items():
        if layout == "per-expert" and key.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors |= _unpacked(key, tensor)
        else:
            tensors[key] = tensor
    return tensors


def _unpacked(key: str, packed: torch.Tensor) -> dict[str, torch.Tensor]:
    prefix, name = key.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
    return {
        f"{prefix}.{expert}.{part}.weight": half
        for expert, whole in enumerate(packed)
        for part, half in zip(parts, whole.chunk(len(parts)), strict=True)
    }


def skeleton_tensors(sizes: Sizes, seed: int) -> dict[str, torch.Tensor]:
    """What a head needs of a target: embedding, final norm and output layer, in float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden = sizes.hidden
    return {
        "model.embed_tokens.weight": torch.randn(sizes.vocab, hidden, generator=generator),
        "model.norm.weight": 1 + 0.3 * torch.randn(hidden, generator=generator),
        "lm_head.weight": torch.randn(sizes.vocab, hidden, generator=generator) * hidden**-0.5,
    }
