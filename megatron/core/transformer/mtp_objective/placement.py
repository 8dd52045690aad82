"""Where a pipeline layout may put the heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer.enums import LayerType

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def check_head_placement(config: TransformerConfig) -> None:
    """Refuse heads on the first pipeline rank of an interleaved layout.

    That rank holds the embedding in its first virtual stage and the heads, with a copy of it, in
    the last one. Both would take part in the exchange that makes copies equal, the last rank
    only once: building the model would hang.

    Raises:
        ValueError: the layout does that.
    """
    rows = config.pipeline_model_parallel_layout.layout
    if len(rows) > 1 and len(rows[0]) > 1 and LayerType.mtp in rows[0][-1]:
        raise ValueError(
            "pipeline_model_parallel_layout puts MTP layers on the first pipeline rank, in its "
            f"virtual stage {len(rows[0]) - 1} of {len(rows[0])}, which hangs when the model is "
            "built: move them to another rank, or use one virtual stage per rank."
        )
