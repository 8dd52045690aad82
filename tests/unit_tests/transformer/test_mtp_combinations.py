"""Wrapped in Float16Module, over a frozen backbone, beside other models.

    python -m pytest tests/unit_tests/transformer/test_mtp_combinations.py
"""

import dataclasses

import pytest
import torch

from tests.support import ModelSpec, bshd_batch, build_model, grads_by_name, is_mtp_param
from tests.support import parallel_world, prepare, worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero, step_gradients
from tests.support.split import heads_of

prepare()

from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

FAMILIES = ("gpt", "hybrid")
ISOLATED = dict(mtp_isolated_loss=True)


@pytest.fixture(autouse=True)
def no_metrics_of_other_models():
    MTPLossLoggingHelper.tracker.clear()


@supports("Float16Module", equal="the model inside it", dtype="bfloat16")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_arguments_travel_through_a_bf16_wrapper(family, tied):
    spec = ModelSpec(family=family, tied=tied, hidden_size=16, dtype=torch.bfloat16)
    call = dict(return_logits=True, mtp_isolated_loss=True, mtp_loss_normalizer=3.0)
    with parallel_world():
        model, inner = build_model(spec), build_model(spec)
        wrapped = Float16Module(inner.config, inner)
        want = step_gradients(model, bshd_batch(2, 8), **call)
        got = step_gradients(wrapped, bshd_batch(2, 8), **call)
        assert wrapped(**bshd_batch(2, 8).forward_kwargs(), **call).dtype == torch.float32
    got = {name.removeprefix("module."): gradient for name, gradient in got.items()}
    assert worst_difference(got, want)[0] == 0.0
    assert nonzero(got) == set(heads_of(want))
    assert all(gradient.isfinite().all() for gradient in got.values())


@supports("Frozen backbone", equal="isolated heads of a model that is not frozen")
@pytest.mark.parametrize("recompute", ["none", "full"], ids=["no recompute", "full recompute"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_a_frozen_backbone_train_as_isolated_ones(family, tied, recompute):
    spec = ModelSpec(family=family, tied=tied, hidden_size=16, recompute=recompute)
    with parallel_world():
        want = step_gradients(
            build_model(dataclasses.replace(spec, overrides=ISOLATED)), bshd_batch(2, 8)
        )
        model = build_model(spec)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_mtp_param(name))
        got = step_gradients(model, bshd_batch(2, 8))
        assert all(p.grad is None for n, p in model.named_parameters() if not is_mtp_param(n))
    assert worst_difference(got, want)[0] == 0.0
    assert nonzero(got) == set(heads_of(want))


OTHERS = {
    "beside a model without heads": dict(mtp_num_layers=0),
    "beside isolated heads": dict(overrides=ISOLATED),
    "beside the other family": dict(family="hybrid"),
}


@supports("Several models in one process", equal="each model alone")
@pytest.mark.parametrize("other", OTHERS)
def test_models_of_one_process_do_not_touch_each_other(other):
    specs = [ModelSpec(hidden_size=16), ModelSpec(**{"hidden_size": 16, "seed": 1, **OTHERS[other]})]
    batches = [bshd_batch(2, 8), bshd_batch(2, 8, "prompt")]
    with parallel_world():
        alone = [step_gradients(build_model(spec), b, 1.0) for spec, b in zip(specs, batches)]
        models = [build_model(spec) for spec in specs]
        outputs = [model(**b.forward_kwargs()) for model, b in zip(models, batches)]
        for output in reversed(outputs):
            generator = torch.Generator().manual_seed(99)
            weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            (output * weights.to(output)).sum().backward()
        for model, want in zip(models, alone):
            assert worst_difference(grads_by_name(model), want)[0] == 0.0
