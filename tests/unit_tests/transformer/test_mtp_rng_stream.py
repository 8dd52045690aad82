"""Isolated heads draw random numbers from a stream of their own.

    python -m pytest tests/unit_tests/transformer/test_mtp_rng_stream.py
"""

import itertools

import pytest
import torch

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_config,
    build_model,
    device,
    is_mtp_param,
    parallel_world,
    prepare,
    run_ranks,
    seed_everything,
)
from tests.support.objective import step_gradients

prepare()

from megatron.core.tensor_parallel import random as rng
from megatron.core.transformer.mtp_objective import rng_stream
from megatron.core.transformer.mtp_objective.rng_stream import (
    own_random_stream,
    shares_random_stream,
)

DROPOUT = dict(hidden_dropout=0.2, attention_dropout=0.2)
JITTER = dict(moe_input_jitter_eps=0.2)
FAMILIES = ["gpt", "hybrid"]


@pytest.fixture
def groups():
    with parallel_world() as groups:
        yield groups


def model_of(family="gpt", recompute="none", experts=0, repeated=False, isolated=True, **fields):
    overrides = dict(mtp_isolated_loss=isolated, **(fields or DROPOUT))
    return build_model(
        ModelSpec(
            family=family,
            recompute=recompute,
            num_experts=experts,
            repeated=repeated,
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            overrides=overrides,
        )
    )


def reseed(seed=5):
    seed_everything(seed)
    rng.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def states():
    """Every generator's state, as one list of byte tensors."""
    host, on_device, tracked = rng._get_all_rng_states()
    return [host, on_device, *(tracked[name] for name in sorted(tracked))]


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def step(model, **forward):
    return step_gradients(model, bshd_batch(2, 8), 1.0, return_logits=True, **forward)


def two_steps(model, **forward):
    """Gradients of two steps from a fixed seed, and the generators' states after them."""
    reseed()
    return [step(model, **forward) for _ in range(2)], states()


CASES = [
    *itertools.product(FAMILIES, ["none", "full", "selective"], [0], [DROPOUT]),
    *itertools.product(FAMILIES, ["none", "full"], [4], [JITTER]),
]


@pytest.mark.parametrize("family, recompute, experts, fields", CASES)
def test_the_policy_draws_as_without_heads(groups, family, recompute, experts, fields):
    model = model_of(family, recompute, experts, **fields)
    trained, after = two_steps(model)
    off, after_off = two_steps(model, compute_mtp_loss=False)
    assert same(after, after_off)
    policy = [name for name in off[0] if not is_mtp_param(name)]
    for with_heads, without in zip(trained, off):
        assert all(torch.equal(with_heads[name], without[name]) for name in policy)
    assert not torch.equal(off[0]["output_layer.weight"], off[1]["output_layer.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_stream_heads_change_what_the_policy_draws(groups, family):
    model = model_of(family)
    model.mtp.shares_random_stream = False
    trained, after = two_steps(model)
    off, after_off = two_steps(model, compute_mtp_loss=False)
    assert not same(after, after_off)
    assert not torch.equal(trained[1]["output_layer.weight"], off[1]["output_layer.weight"])


@pytest.mark.parametrize("repeated", [False, True])
def test_heads_draw_anew_at_every_step_and_again_after_a_resume(groups, repeated):
    model = model_of(repeated=repeated)
    (first, second), _ = two_steps(model)
    heads = [name for name in first if is_mtp_param(name) and name.endswith("fc1.weight")]
    assert not any(torch.equal(first[name], second[name]) for name in heads)
    reseed()
    step(model)
    host, on_device, tracked = rng._get_all_rng_states()
    saved = host.clone(), on_device.clone(), {name: s.clone() for name, s in tracked.items()}
    reseed(6)
    step(model_of())
    rng._set_all_rng_states(*saved)
    again = step(model)
    assert all(torch.equal(again[name], second[name]) for name in second)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_heads_draw_what_they_drew(groups, family):
    plain, _ = two_steps(model_of(family, "none"))
    full, _ = two_steps(model_of(family, "full"))
    for step_plain, step_full in zip(plain, full):
        assert all(torch.equal(step_full[name], step_plain[name]) for name in step_plain)


def draws():
    """Numbers from the device's generator and from the tracker's, as floats."""
    values = [torch.rand(4, device=device())]
    with rng.get_cuda_rng_tracker().fork():
        values.append(torch.rand(4, device=device()))
    return torch.stack(values).cpu()


def test_the_stream_differs_from_the_policys_and_leaves_every_state_as_it_was(groups):
    reseed()
    before = [state.clone() for state in states()]
    with own_random_stream():
        first = draws()
    assert same(states(), before)
    with own_random_stream():
        assert torch.equal(draws(), first)
    policy = draws()
    with own_random_stream():
        later = draws()
    assert all(not torch.equal(a, b) for a, b in itertools.combinations([first, policy, later], 2))
    assert len(first.unique()) == 8


def test_an_error_inside_restores_the_states_too(groups):
    before = [state.clone() for state in states()]
    with pytest.raises(RuntimeError, match="inside"), own_random_stream():
        draws()
        raise RuntimeError("inside")
    assert same(states(), before)


def drawn_on_tensor_parallel_rank():
    with parallel_world(tp=2), own_random_stream():
        return draws()


def test_tensor_parallel_ranks_share_what_they_shared_and_differ_where_they_differed():
    first, second = run_ranks(drawn_on_tensor_parallel_rank, 2)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


@pytest.mark.parametrize("detached", [False, True])
def test_heads_that_are_not_isolated_keep_upstreams_stream(groups, monkeypatch, detached):
    model = model_of(isolated=False, mtp_detach_heads=detached, **DROPOUT)
    monkeypatch.setattr(rng_stream, "own_random_stream", _refused)
    two_steps(model)
    if not detached:
        with pytest.raises(AssertionError, match="entered"):
            step(model, mtp_isolated_loss=True)


def test_without_random_numbers_no_state_is_touched(groups, monkeypatch):
    model = model_of(hidden_dropout=0.0, attention_dropout=0.0)
    monkeypatch.setattr(rng_stream, "own_random_stream", _refused)
    step(model)


def test_a_call_that_does_not_isolate_keeps_upstreams_stream(groups, monkeypatch):
    model = model_of()
    monkeypatch.setattr(rng_stream, "own_random_stream", _refused)
    step(model, mtp_isolated_loss=False)


def _refused():
    raise AssertionError("the stream was entered")


def test_generators_held_by_cuda_graphs_are_refused_at_construction_and_per_call(groups):
    attached = model_of(isolated=False, **DROPOUT)
    rng.get_cuda_rng_tracker().use_cudagraphable_rng = True
    with pytest.raises(ValueError, match="Megatron's plain random tracker.*hidden_dropout, att"):
        model_of()
    with pytest.raises(ValueError, match="because of a call with mtp_isolated_loss=True"):
        step(attached, mtp_isolated_loss=True)
    model_of(hidden_dropout=0.0, attention_dropout=0.0)
    model_of(isolated=False, **DROPOUT)


def test_layers_interleaved_with_the_decoders_are_refused(groups):
    config = build_config(ModelSpec(overrides=dict(mtp_isolated_loss=True, **DROPOUT)), groups)
    config.overlap_moe_expert_parallel_comm = True
    with pytest.raises(ValueError, match="overlap_moe_expert_parallel_comm their layers run"):
        shares_random_stream(config, is_hybrid=False)


@pytest.mark.parametrize(
    "layout, shared",
    [
        ([["embedding", "decoder", "decoder"], ["mtp", "mtp"], ["loss"]], [True, False, False]),
        ([["embedding", "decoder"], ["decoder"], ["mtp", "mtp", "loss"]], [True, True, False]),
        ([["embedding"], ["decoder"], ["decoder", "mtp", "mtp", "loss"]], [False, True, True]),
    ],
)
def test_a_stage_without_decoder_layers_has_nothing_to_share(groups, layout, shared):
    config = build_config(ModelSpec(overrides=dict(mtp_isolated_loss=True, **DROPOUT)), groups)
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    config.pipeline_model_parallel_size = 3
    config.pipeline_model_parallel_layout = PipelineParallelLayerLayout(layout, 3)
    assert [shares_random_stream(config, False, rank) for rank in range(3)] == shared
