"""Wrapped in Float16Module, over a frozen backbone, beside other models, on a dynamic CP group.

    python -m pytest tests/unit_tests/transformer/test_mtp_combinations.py
"""

import copy
import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist

from tests.support import ModelSpec, bshd_batch, build_model, cp_shard, fp64_cross_entropy
from tests.support import grads_by_name, is_mtp_param, parallel_world, prepare, run_ranks
from tests.support import thd_batch, worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero, step_gradients
from tests.support.split import heads_of
from tests.support.whole_gradients import whole_gradients

prepare()

from megatron.core.transformer.attention import SelfAttention
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


DYNAMIC = {
    "gpt, CP=2 of 4 data-parallel ranks": ("gpt", {}),
    "gpt, CP=2 of 4 data-parallel ranks, isolated": ("gpt", ISOLATED),
    "hybrid, CP=2 of 4 data-parallel ranks": ("hybrid", {}),
}


def _dynamic_batches():
    return [thd_batch((7, 3), (8, 4)), thd_batch((4, 11), (4, 12), "prompt")]


def _dynamic_spec(name):
    family, overrides = DYNAMIC[name]
    return ModelSpec(family=family, per_token=True, hidden_size=16, overrides=overrides)


def _dynamic():
    """Rank function: two groups of two ranks, each with a batch of its own."""
    found = {}
    for name in DYNAMIC:
        with fp64_cross_entropy(), parallel_world() as groups:
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            batch, pair = _dynamic_batches()[dist.get_rank() // 2], pairs[dist.get_rank() // 2]
            params = batch.packed_seq_params
            params.cp_group, params.local_cp_size = pair, 2
            mine = cp_shard(batch, 2, pair.rank())
            model = build_model(_dynamic_spec(name))
            # The release's rotary embedding does not ask the batch for its group: a fault of its
            # own, with and without heads.
            for module in model.modules():
                if isinstance(module, SelfAttention):
                    module.pg_collection = copy.copy(module.pg_collection)
                    module.pg_collection.cp = pair
            step_gradients(model, mine, packed_seq_params=params)
            found[name] = whole_gradients([model], groups)
            MTPLossLoggingHelper.tracker.clear()
            for group in pairs:
                dist.destroy_process_group(group)
    return found


@functools.cache
def _dynamic_found():
    return run_ranks(_dynamic, 4, timeout=120)[0]


@supports("Dynamic context parallel (`packed_seq_params.cp_group`)", agrees=1e-12, ranks=4)
@pytest.mark.parametrize("name", DYNAMIC)
def test_a_context_parallel_group_of_the_batch_gives_the_gradients_of_one_rank(name):
    with fp64_cross_entropy(), parallel_world():
        model = build_model(_dynamic_spec(name))
        each = [step_gradients(model, batch) for batch in _dynamic_batches()]
    want = {parameter: each[0][parameter] + each[1][parameter] for parameter in each[0]}
    got = _dynamic_found()[name]
    assert worst_difference(got, want)[0] <= 1e-12
    assert nonzero(got) == (set(heads_of(want)) if "isolated" in name else set(want))
