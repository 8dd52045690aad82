"""Objectives with a teacher that cannot work, refused in words.

    python -m pytest tests/unit_tests/transformer/test_mtp_teacher_refusals.py
"""

import dataclasses
import math
import types

import pytest
import torch

from tests.support import ModelSpec, bshd_batch, build_model, parallel_world, prepare
from tests.support.objective import nonzero, step_gradients

prepare()

from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.transformer_config import TransformerConfig

SPEC = ModelSpec(hidden_size=16, num_attention_heads=2, dtype=torch.float32)


def taught(spec=SPEC, **overrides):
    return dataclasses.replace(spec, overrides={"mtp_objective": "kl", **overrides})


@pytest.fixture
def world():
    """Groups of one rank."""
    with parallel_world() as groups:
        yield groups


KL = dict(mtp_objective="kl")
REFUSED = [
    (dict(mtp_objective="mse"), "mtp_objective must be one of ce, kl, tv, ce.kl, ce.tv, got 'mse'"),
    (dict(mtp_depth_weighting="path"), "mtp_depth_weighting must be one of uniform, chained, got"),
    *[
        (dict(KL, mtp_teacher_temperature=bad), "temperature must be finite and at least 0.0001")
        for bad in (0, 1e-5, -1.0, math.nan, math.inf, "1", True, None)
    ],
    *[
        (dict(KL, mtp_teacher_top_k=bad), "top_k must be an integer ≥ 0.*got .*-1 for every token")
        for bad in (-1, 2.0, True, None)
    ],
    *[
        (dict(KL, mtp_teacher_top_p=bad), "top_p must be greater than 0 and at most 1 .*got ")
        for bad in (0.0, 1.5, -0.1, math.nan, "1", True)
    ],
    *[
        (dict(mtp_objective="ce+kl", mtp_objective_weight=bad), "must be finite and at least 0")
        for bad in (-0.1, math.nan, math.inf, "1")
    ],
    (dict(KL, mtp_objective_weight=0.5), "mtp_objective_weight=0.5 has no effect with"),
    *[
        (dict(mtp_depth_weights=bad), "one finite number ≥ 0 for each of the 2 MTP depths.*got")
        for bad in ([1.0], [1.0, math.nan], [1.0, -1.0], [1.0, math.inf], 2.0, [True, 1.0])
    ],
    (dict(mtp_depth_weights=[0.0, 0.0]), "mtp_depth_weights must not all be 0"),
    (dict(mtp_teacher_temperature=0.7), "mtp_teacher_temperature=0.7 has no effect"),
    (dict(mtp_teacher_top_k=5), "mtp_teacher_top_k=5 has no effect.*mtp_expected_acceptance=True"),
    (dict(mtp_teacher_top_p=0.9), "mtp_teacher_top_p=0.9 has no effect"),
]


@pytest.mark.parametrize("fields, text", REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_what_cannot_work_is_refused_when_the_config_is_made(fields, text):
    with pytest.raises(ValueError, match=text):
        TransformerConfig(
            num_layers=1, hidden_size=4, num_attention_heads=1, mtp_num_layers=2, **fields
        )


def test_what_is_set_after_construction_is_refused_by_the_next_forward(world):
    model = build_model(taught())
    model.config.mtp_teacher_temperature = 0.0
    with pytest.raises(ValueError, match="mtp_teacher_temperature must be finite"):
        model(**bshd_batch(2, 8).forward_kwargs())


@pytest.mark.parametrize("weights", [[1.0], []])
def test_depth_weights_without_heads_are_refused(weights):
    with pytest.raises(ValueError, match="each of the 0 MTP depths"):
        TransformerConfig(
            num_layers=1, hidden_size=4, num_attention_heads=1, mtp_depth_weights=weights
        )


@pytest.mark.parametrize(
    "fields", [KL, dict(mtp_depth_weighting="chained"), dict(mtp_expected_acceptance=True)]
)
def test_a_teacher_without_heads_is_refused(fields):
    with pytest.raises(ValueError, match="is for MTP heads, but mtp_num_layers is None: set"):
        TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, **fields)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("objective", ["kl", "ce+kl", "ce+tv"])
def test_the_smallest_temperature_gives_finite_gradients_in_every_precision(
    world, objective, dtype
):
    half = dict(fp16=True) if dtype == torch.float16 else {}
    fields = dict(mtp_objective=objective, mtp_teacher_temperature=1e-4, **half)
    model = build_model(taught(dataclasses.replace(SPEC, dtype=dtype), **fields))
    found = step_gradients(model, bshd_batch(2, 8))
    assert nonzero(found) and all(gradient.isfinite().all() for gradient in found.values())


def test_deferred_weight_gradients_are_refused_when_the_config_is_made():
    with pytest.raises(ValueError, match="policy as teacher.*defer_embedding_wgrad_compute"):
        TransformerConfig(
            num_layers=2,
            hidden_size=4,
            num_attention_heads=1,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            gradient_accumulation_fusion=True,
            defer_embedding_wgrad_compute=True,
            mtp_num_layers=1,
            **KL,
        )


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_a_top_k_larger_than_the_vocabulary_is_refused_when_the_model_is_built(world, family):
    spec = dataclasses.replace(SPEC, family=family)
    build_model(taught(spec, mtp_teacher_top_k=64))
    with pytest.raises(ValueError, match="must not exceed the vocabulary of 64, got 65"):
        build_model(taught(spec, mtp_teacher_top_k=65))


def add_bias(model):
    layer = model.output_layer
    layer.bias = torch.nn.Parameter(layer.weight.new_zeros(layer.weight.size(0)))


def own_loss(model):
    model.compute_language_model_loss = types.MethodType(
        lambda self, *args: LanguageModule.compute_language_model_loss(self, *args), model
    )


def shard_weight(model):
    model.output_layer.weight.__fsdp_param__ = True


@pytest.mark.parametrize(
    "change, text",
    [
        (add_bias, "no output layer with a bias"),
        (own_loss, "does not call compute_language_model_loss"),
        (shard_weight, "FSDP shards the output layer's"),
    ],
)
def test_a_head_that_rows_would_not_reproduce_is_refused(world, change, text):
    model = build_model(taught())
    change(model)
    with pytest.raises(ValueError, match=f"policy as teacher.*{text}.*set mtp_objective='ce'"):
        model(**bshd_batch(2, 8).forward_kwargs())


def test_a_head_with_a_bias_is_refused_when_the_model_is_built(world, monkeypatch):
    plain = tensor_parallel.ColumnParallelLinear
    with_bias = lambda *args, **kwargs: plain(*args, **{**kwargs, "bias": True})
    monkeypatch.setattr(tensor_parallel, "ColumnParallelLinear", with_bias)
    build_model(SPEC)
    with pytest.raises(ValueError, match="policy as teacher.*no output layer with a bias"):
        build_model(taught())
