"""The MTP objective needs an output layer over the vocabulary: critics have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import torch

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule


def require_vocabulary_head(model: LanguageModule) -> None:
    """Refuse a model with MTP heads whose output layer does not score the vocabulary.

    RL frameworks make a critic of a policy's configuration: its output layer is replaced by one
    with a single output, or left out. Call this after that; forward calls it where the
    objective is about to run. A model without heads, or a pipeline stage without output layer,
    passes. So does a wrapper, such as an adapter, if a weight inside has the vocabulary's rows.

    Args:
        model: GPTModel or HybridModel, on any pipeline stage.

    Raises:
        ValueError: the output layer is missing, or does not have ``model.vocab_size`` outputs (over
            the tensor-parallel ranks).
    """
    config = model.config
    has_heads = model.mtp_process or getattr(config, "mtp_standalone", False)
    if not (config.mtp_num_layers and has_heads and model.post_process):
        return
    found = _no_vocabulary(getattr(model, "output_layer", None), model)
    if found is not None:
        raise ValueError(
            f"MTP heads share an output layer over the vocabulary ({model.vocab_size} tokens), but "
            f"this model has {found}: a critic has no heads to train. Build it with "
            f"mtp_num_layers=None, or call forward with compute_mtp_loss=False."
        )


def _no_vocabulary(layer: Any, model: LanguageModule) -> Optional[str]:
    """What is there instead of a vocabulary head; None if it is one."""
    if layer is None:
        return "no output layer"
    outputs = _possible_outputs(layer)
    # A sharded weight has the rows of this rank alone.
    allowed = {model.vocab_size, model.vocab_size / model.pg_collection.tp.size()}
    if outputs & allowed:
        return None
    name = type(layer).__name__
    if not outputs:
        return f"{name}, which has no weight"
    return f"{name} with {min(outputs)} output(s)"


def _possible_outputs(layer: torch.nn.Module) -> set[int]:
    """Outputs of a linear layer, or of all that a wrapper holds.

    A tied layer has no weight of its own, but outputs it was made for.
    """
    weight = getattr(layer, "weight", None)
    if weight is not None:
        return {weight.size(0)}
    made_for = {part.output_size for part in layer.modules() if hasattr(part, "output_size")}
    return made_for | {weight.size(0) for weight in layer.parameters() if weight.dim() == 2}
