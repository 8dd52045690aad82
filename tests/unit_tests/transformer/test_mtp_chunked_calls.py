"""The chunked objective in models: metrics, hooks, the overlap path.

    python -m pytest tests/unit_tests/transformer/test_mtp_chunked_calls.py
"""

import argparse
import dataclasses

import pytest
import torch

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_model,
    parallel_world,
    prepare,
    run_ranks,
    worst_difference,
)
from tests.support.host_sync import HostSyncs
from tests.support.objective import step_gradients
from tests.support.overlap import overlap_spec, plan_gradients
from tests.support.release import loss_key, require_overlap_on_one_stage

prepare()

from megatron.core.transformer.mtp_objective.metrics import mtp_metrics
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training.arguments import add_megatron_arguments

SPEC = ModelSpec(hidden_size=16, num_attention_heads=2, dtype=torch.float32)
CHUNKS = dict(mtp_loss_chunk_size=3)


def chunked(spec, **overrides):
    return dataclasses.replace(spec, overrides={**spec.overrides, **CHUNKS, **overrides})


@pytest.fixture
def world():
    """Groups of one rank."""
    with parallel_world() as groups:
        yield groups


def recorded(family, mask, tp):
    """Metrics and tracker with whole logits and in chunks."""
    found = []
    with parallel_world(tp=tp):
        spec = dataclasses.replace(SPEC, family=family)
        for one in (spec, chunked(spec)):
            model = build_model(one)
            MTPLossLoggingHelper.tracker.clear()
            model(**bshd_batch(2, 16, mask).forward_kwargs()).sum().backward()
            values = MTPLossLoggingHelper.tracker.items()
            tracked = {k: v.tolist() for k, v in values if isinstance(v, torch.Tensor)}
            found.append((mtp_metrics(model).as_dict(), tracked))
    return found


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mask", ["prompt", "empty"])
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_metrics_are_those_of_whole_logits(family, mask, tp):
    for whole, chunks in run_ranks(recorded, tp, family, mask, tp):
        for want, got in zip(whole, chunks):
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert got[name] == pytest.approx(value, rel=1e-5, nan_ok=True)
        if mask == "prompt":
            assert whole[1][loss_key()][0] > 0 and whole[0]["mtp_1_loss"] > 0


def test_what_waits_for_parameters_before_the_output_layer_runs_is_waited_for(world):
    model, batch = build_model(chunked(SPEC, mtp_isolated_loss=True)), bshd_batch(2, 8)
    want = step_gradients(model, None, 0.0, **batch.forward_kwargs())
    weight = model.output_layer.weight
    arrived = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)  # as long as its all-gather is under way

    def wait(*unused):
        weight.data.copy_(arrived)

    model.output_layer.register_forward_pre_hook(wait)
    got = step_gradients(model, None, 0.0, **batch.forward_kwargs())
    assert worst_difference(got, want)[0] == 0.0


def through_a_plan():
    with parallel_world(ep=2):
        spec = overlap_spec(isolated=True)
        kwargs = bshd_batch(2, 8).forward_kwargs()
        whole = plan_gradients(build_model(spec), 0.0, **kwargs)
        model = build_model(chunked(spec))
        return whole, plan_gradients(model, 0.0, **kwargs), step_gradients(model, None, 0.0, **kwargs)


def test_a_schedule_plan_runs_the_objective_in_chunks_too():
    require_overlap_on_one_stage()
    for whole, plan, forward in run_ranks(through_a_plan, 2):
        assert worst_difference(plan, forward)[0] == 0.0
        assert 0 < worst_difference(plan, whole)[0] <= 1e-6  # a float32 cross-entropy in the latter


@pytest.mark.parametrize("labels", ["given", "derived"])
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_a_training_step_with_heads_makes_the_host_wait_no_more_than_one_without(world, family, labels):
    kwargs = bshd_batch(2, 16, "prompt").forward_kwargs()
    if labels == "derived":
        kwargs["labels"] = None
    found = []
    model = build_model(chunked(dataclasses.replace(SPEC, family=family)))
    model(**kwargs).sum().backward()  # creates the tracker
    for on in (False, True):
        with HostSyncs() as syncs:
            model(**kwargs, compute_mtp_loss=on).sum().backward()
        found.append(syncs.names)
    assert found[1] == found[0]


def test_the_flag_reaches_the_config():
    parser = argparse.ArgumentParser()
    add_megatron_arguments(parser)
    assert parser.parse_args(["--mtp-loss-chunk-size", "512"]).mtp_loss_chunk_size == 512
    assert parser.parse_args([]).mtp_loss_chunk_size == 0


def test_labels_of_another_length_are_refused(world):
    model, kwargs = build_model(chunked(SPEC)), bshd_batch(2, 8).forward_kwargs()
    kwargs.update(labels=kwargs["labels"][:, :4], loss_mask=None)
    with pytest.raises(ValueError, match="labels must have the shape of input_ids"):
        model(**kwargs)
