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
        config: its ``mtp_detach_heads`` also holds with ``mtp_isolated_loss``.
        override: ``mtp_isolated_loss`` of one forward call; None follows ``config``. A True here
            isolates gradients only; clipping is isolated by the configuration, since gradient-norm
            groups are fixed when the model is built.
    """
    return config.mtp_detach_heads if override is None else bool(override)
