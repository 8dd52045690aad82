"""Where a pipeline may put the heads, and how its stages must talk to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer.enums import LayerType

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def check_head_placement(config: TransformerConfig) -> None:
    """Refuse pipelines in which a model with heads hangs or gets wrong gradients.

    A configuration without ``mtp_num_layers`` passes.

    Raises:
        ValueError: heads on the first pipeline rank of an interleaved layout. That rank holds the
            embedding in its first virtual stage and the heads, with a copy of it, in the last
            one. Both would take part in the exchange that makes copies equal, the last rank
            only once: building the model would hang.
        ValueError: two interleaved pipeline ranks with ``batch_p2p_comm``. Each sends to and
            receives from the other in both directions within one batch, where messages cannot be
            told apart: gradients come out wrong. Megatron's trainer, which batches whenever it
            does not overlap, refuses ``--no-overlap-p2p-communication`` there, heads or not.
    """
    if not config.mtp_num_layers:
        return
    if config.pipeline_model_parallel_layout is not None:
        _check_layout(config.pipeline_model_parallel_layout.layout)
    _check_communication(config)


def _check_layout(rows: list[list[list[LayerType]]]) -> None:
    if len(rows) > 1 and len(rows[0]) > 1 and LayerType.mtp in rows[0][-1]:
        raise ValueError(
            "pipeline_model_parallel_layout puts MTP layers on the first pipeline rank, in its "
            f"virtual stage {len(rows[0]) - 1} of {len(rows[0])}, which hangs when the model is "
            "built: move them to another rank, or use one virtual stage per rank."
        )


def _check_communication(config: TransformerConfig) -> None:
    chunks = config.virtual_pipeline_model_parallel_size
    if chunks is not None and config.pipeline_model_parallel_size == 2 and config.batch_p2p_comm:
        raise ValueError(
            f"MTP on 2 pipeline ranks with virtual_pipeline_model_parallel_size={chunks} needs "
            "batch_p2p_comm=False, got True: a batch then holds two messages each way between the "
            "same ranks, which get mixed up. Set batch_p2p_comm=False and, as the trainer does, "
            "overlap_p2p_comm=True; or use more ranks."
        )
