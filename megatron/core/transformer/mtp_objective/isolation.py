"""Whether the MTP objective is cut off from everything but the heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def is_isolated(config: TransformerConfig, override: Optional[bool] = None) -> bool:
    """The caller's word if there is one, else the configuration's.

    Isolation cuts three edges: decoder hidden states into the first depth, embeddings into every
    depth, the output layer's weight. Depth to depth stays connected.

    Args:
        config: ``mtp_isolated_loss`` or upstream's ``mtp_detach_heads``.
        override: ``mtp_isolated_loss`` of one forward call; None follows ``config``. Given here
            or set after the model was built, it isolates gradients only: gradient-norm groups,
            which isolate clipping, are fixed by the configuration a model is built with.
    """
    if override is not None:
        return bool(override)
    return config.mtp_isolated_loss or config.mtp_detach_heads
