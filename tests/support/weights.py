"""Initial weights that depend on names alone, not on how a model is split.

Each full parameter is drawn from a generator seeded by its name in the unsplit model; a rank then
takes its part. So every context-, tensor-, pipeline- and expert-parallel split of a model, in
every dtype, starts from the same weights. Sizes are chosen so that activations and gradients stay
near 1, also those of norms and biases, which would otherwise start as constants.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch


@torch.no_grad()
def initialize(model: torch.nn.Module, pg_collection: Any, seed: int) -> None:
    """Overwrite all parameters of ``model``.

    Args:
        model: A GPTModel or HybridModel, or a stage of one.
        pg_collection: Its process groups (tp, ep and expt_tp are used).
        seed: Any int.
    """
    for name, parameter in model.named_parameters():
        whole_name = whole_model_name(name, model, pg_collection)
        is_expert = ".experts." in name
        tp_group = pg_collection.expt_tp if is_expert else pg_collection.tp
        value = _draw(whole_name, parameter, tp_group, seed, model.config)
        parameter.copy_(value.to(parameter.dtype))


def whole_model_name(name: str, model: torch.nn.Module, pg_collection: Any) -> str:
    """The name a parameter of this stage has in the model that is not split over PP and EP."""

    def global_layer(match: re.Match) -> str:
        layer = model.decoder.layers[int(match.group(1))]
        return f"decoder.layers.{layer.layer_number - 1}."

    def global_expert(match: re.Match) -> str:
        per_rank = model.config.num_moe_experts // pg_collection.ep.size()
        return f"local_experts.{int(match.group(1)) + pg_collection.ep.rank() * per_rank}."

    name = re.sub(r"^decoder\.layers\.(\d+)\.", global_layer, name)
    name = re.sub(r"local_experts\.(\d+)\.", global_expert, name)
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name


def _draw(name: str, parameter: torch.Tensor, tp_group: Any, seed: int, config: Any):
    """This rank's part of the parameter called ``name``, float64 on the parameter's device."""
    parts = tp_group.size() if getattr(parameter, "tensor_model_parallel", False) else 1
    shape = list(parameter.shape)
    dim = parameter.partition_dim if parts > 1 else 0
    shape[dim] *= parts
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    if parameter.dim() > 1:
        whole *= parameter.shape[-1] ** -0.5 if parts == 1 else shape[-1] ** -0.5
    else:
        is_norm_weight = name.endswith("weight")
        whole = whole * 0.1 + float(is_norm_weight and not config.layernorm_zero_centered_gamma)
    if parts > 1:
        # A gated MLP holds its two halves one after the other on every rank: stride 2.
        pieces = whole.chunk(parts * parameter.partition_stride, dim=dim)
        whole = torch.cat(pieces[tp_group.rank() :: parts], dim=dim)
    return whole.to(parameter.device)
