"""What the chunked objective cannot serve: refused with the config, the model, or the first forward.

    python -m pytest tests/unit_tests/transformer/test_mtp_chunked_refused.py
"""

import dataclasses
import types

import pytest
import torch

from tests.support import ModelSpec, bshd_batch, build_model, parallel_world, prepare

prepare()

from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

SPEC = ModelSpec(hidden_size=16, num_attention_heads=2, dtype=torch.float32)
CHUNKS = dict(mtp_loss_chunk_size=3)


def chunked(spec):
    return dataclasses.replace(spec, overrides=CHUNKS)


@pytest.fixture
def world():
    """Groups of one rank."""
    with parallel_world() as groups:
        yield groups


@pytest.mark.parametrize("size", [-1, 1.5, True, "64", None])
def test_a_bad_chunk_size_is_refused_when_the_config_is_made(size):
    with pytest.raises(ValueError, match="mtp_loss_chunk_size must be an integer ≥ 0.*got "):
        TransformerConfig(
            num_layers=1, hidden_size=4, num_attention_heads=1, mtp_loss_chunk_size=size
        )


@pytest.mark.parametrize("size", [-1, True, "64"])
def test_a_bad_chunk_size_set_after_construction_is_refused_by_the_next_forward(world, size):
    model = build_model(SPEC)
    model.config.mtp_loss_chunk_size = size
    with pytest.raises(ValueError, match="mtp_loss_chunk_size must be an integer ≥ 0.*got "):
        model(**bshd_batch(2, 8).forward_kwargs())


def test_deferred_weight_gradients_are_refused_when_the_config_is_made():
    with pytest.raises(ValueError, match="defer_embedding_wgrad_compute.*mtp_loss_chunk_size=0"):
        TransformerConfig(
            num_layers=2,
            hidden_size=4,
            num_attention_heads=1,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            gradient_accumulation_fusion=True,
            defer_embedding_wgrad_compute=True,
            **CHUNKS,
        )


class Adapted(ColumnParallelLinear):
    """An output layer with a forward of its own."""


def adapt(model):
    model.output_layer.__class__ = Adapted


def add_bias(model):
    layer = model.output_layer
    layer.bias = torch.nn.Parameter(layer.weight.new_zeros(layer.weight.size(0)))


def own_loss(model):
    model.compute_language_model_loss = types.MethodType(
        lambda self, labels, logits: LanguageModule.compute_language_model_loss(self, labels, logits),
        model,
    )


def shard_weight(model):
    model.output_layer.weight.__fsdp_param__ = True


@pytest.mark.parametrize(
    "change, text",
    [
        (adapt, "got Adapted, whose forward it would leave out"),
        (add_bias, "no output layer with a bias"),
        (own_loss, "does not call compute_language_model_loss"),
        (shard_weight, "FSDP shards the output layer's"),
    ],
)
def test_a_head_that_chunks_would_not_reproduce_is_refused(world, change, text):
    model = build_model(chunked(SPEC))
    change(model)
    with pytest.raises(ValueError, match=f"{text}.*set mtp_loss_chunk_size=0"):
        model(**bshd_batch(2, 8).forward_kwargs())


@pytest.fixture
def built_with(monkeypatch):
    """Replaces what both models make their output layer from."""

    def replace(make):
        monkeypatch.setattr(tensor_parallel, "ColumnParallelLinear", make)

    return replace


def with_bias(*args, **kwargs):
    return ColumnParallelLinear(*args, **{**kwargs, "bias": True})


def sharded_by_gtp(*args, **kwargs):
    layer = ColumnParallelLinear(*args, **kwargs)
    layer.gtp_remat_size = 2
    return layer


@pytest.mark.parametrize(
    "make, text",
    [
        (Adapted, "got Adapted, whose forward it would leave out"),
        (with_bias, "no output layer with a bias"),
        (sharded_by_gtp, "no output layer with a weight sharded by GTP"),
    ],
)
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_an_output_layer_that_chunks_would_not_reproduce_is_refused_when_it_is_built(
    world, built_with, family, make, text
):
    built_with(make)
    spec = dataclasses.replace(SPEC, family=family)
    build_model(spec)
    build_model(dataclasses.replace(chunked(spec), mtp_num_layers=0))
    with pytest.raises(ValueError, match=f"{text}.*set mtp_loss_chunk_size=0"):
        build_model(chunked(spec))


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_a_loss_of_the_models_own_is_refused_when_it_is_built(world, monkeypatch, family):
    spec = dataclasses.replace(SPEC, family=family)
    kind = type(build_model(spec))
    usual = LanguageModule.compute_language_model_loss
    monkeypatch.setattr(
        kind, "compute_language_model_loss", lambda *args: usual(*args), raising=False
    )
    build_model(spec)
    with pytest.raises(ValueError, match="compute_language_model_loss.*set mtp_loss_chunk_size=0"):
        build_model(chunked(spec))
