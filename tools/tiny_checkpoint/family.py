"""What describes a family's tiny checkpoint, and its sizes.

Sizes are tiny but uneven on purpose: more query heads than key-value heads, heads × head_dim
different from the hidden size, 2·I different from H. A mapping that mixes two of them up then
meets a shape that does not fit.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

LAYOUTS = ("per-expert", "packed")
DTYPES = ("bf16", "fp32")
Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the tiny model.

    Attributes:
        hidden: Width H of the residual stream, a multiple of 8.
        experts: Number of routed experts E; two are active per token.
        vocab: Rows of the embedding; the tokenizer is trained to this many tokens.
    """

    hidden: int = 64
    experts: int = 8
    vocab: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    expert_intermediate: int = 48
    shared_intermediate: int = 40
    dense_intermediate: int = 112


@dataclasses.dataclass(frozen=True)
class TinyFamily:
    """One family.

    Attributes:
        architecture: The string in ``architectures`` of config.json, the same for all layouts.
        layouts: Expert layouts in which checkpoints of this family are found.
        zero_centred: Whether its norms store w and apply 1 + w.
        model_config: Sizes and a dict of token ids to the contents of config.json.
        head_shapes: Sizes and layout to the head's keys and shapes, in checkpoint order.
        target: The transformers classes (configuration, model) of the target; None where only
            the embedding, the final norm and the output layer are written.
    """

    architecture: str
    layouts: tuple[str, ...]
    zero_centred: bool
    model_config: Callable[[Sizes, dict[str, int]], dict[str, Any]]
    head_shapes: Callable[[Sizes, str], Shapes]
    target: tuple[str, str] | None = None


def gated_mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    """Shapes of a gated MLP under a prefix."""
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }
