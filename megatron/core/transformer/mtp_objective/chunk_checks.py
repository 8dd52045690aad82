"""What the chunked objective cannot serve, refused before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Optional

from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.transformer_config import TransformerConfig

ASKED = "mtp_loss_chunk_size > 0"
INSTEAD = "set mtp_loss_chunk_size=0 to compute the MTP objective from whole logits."


def check_chunking_config(config: TransformerConfig) -> None:
    """Refuse what cannot work with ``mtp_loss_chunk_size`` > 0, when a model is configured.

    Raises:
        ValueError: the size is no integer ≥ 0; or the output layer's weight gradient is deferred.
    """
    size = config.mtp_loss_chunk_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(
            f"mtp_loss_chunk_size must be an integer ≥ 0 (rows of logits at a time; 0: all at "
            f"once), got {size!r}."
        )
    if size and config.defer_embedding_wgrad_compute:
        raise ValueError(
            "mtp_loss_chunk_size > 0 computes the output weight's gradient in forward, and "
            "defer_embedding_wgrad_compute keeps activations to compute it later: "
            f"unset that, or {INSTEAD}"
        )


def check_chunked_model(model: LanguageModule) -> None:
    """`check_chunking_config` and `check_chunked_head`, of what a model is built with.

    What wraps or replaces its parts later (adapters, FSDP) is found by the first forward.

    Args:
        model: GPTModel or HybridModel, with its output layer. One that does not compute the
            objective of heads is not looked at.

    Raises:
        ValueError: what was found, and what to change.
    """
    if model.config.mtp_loss_chunk_size and computes_objective(model):
        check_chunking_config(model.config)
        check_model_head(model)


def computes_objective(model: LanguageModule) -> bool:
    """Whether the objective of heads is computed on this model's pipeline stage."""
    config = model.config
    heads = model.mtp_process or getattr(config, "mtp_standalone", False)
    return bool(config.mtp_num_layers and heads and model.post_process)


def check_model_head(model: LanguageModule, asked: str = ASKED, instead: str = INSTEAD) -> None:
    """`check_chunked_head` of a model's own output layer and loss."""
    check_chunked_head(
        model.output_layer,
        scale_logits_fn=model._scale_logits if model.config.use_mup else None,
        compute_language_model_loss=model.compute_language_model_loss,
        asked=asked,
        instead=instead,
    )


def check_chunked_head(
    output_layer: Any,
    output_weight: Optional[Tensor] = None,
    scale_logits_fn: Optional[Callable] = None,
    compute_language_model_loss: Optional[Callable] = None,
    *,
    asked: str = ASKED,
    instead: str = INSTEAD,
) -> None:
    """Refuse an output layer or a loss whose result or side effects chunks would not reproduce.

    Args:
        output_layer: the model's.
        output_weight: weight in place of its own.
        scale_logits_fn, compute_language_model_loss: the model's; None for the usual ones.
        asked, instead: for messages, what asks for chunks and how to do without.

    Raises:
        ValueError: what was found, and what to change.
    """
    from torch.distributed.tensor import DTensor

    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    if type(output_layer) is not ColumnParallelLinear:
        raise ValueError(
            f"{asked} multiplies by the weight of a ColumnParallelLinear output layer itself, "
            f"got {type(output_layer).__name__}, whose forward it would leave out: {instead}"
        )
    # Older releases do not know GTP.
    if output_layer.bias is not None or getattr(output_layer, "gtp_remat_size", 1) > 1:
        found = "a bias" if output_layer.bias is not None else "a weight sharded by GTP"
        raise ValueError(f"{asked} knows no output layer with {found}: {instead}")
    for weight in (output_layer.weight, output_weight):
        if hasattr(weight, "__fsdp_param__") or isinstance(weight, DTensor):
            raise ValueError(
                f"{asked} needs the whole weight of this rank's part of the vocabulary, and "
                f"FSDP shards the output layer's: {instead}"
            )
    for name, given, usual in (
        ("compute_language_model_loss", compute_language_model_loss, "compute_language_model_loss"),
        ("scale_logits_fn", scale_logits_fn, "_scale_logits"),
    ):
        if given is None or getattr(given, "__func__", None) is getattr(LanguageModule, usual):
            continue
        raise ValueError(
            f"{asked} computes the objective itself and does not call {name}, but this model has "
            f"its own: {instead}"
        )
