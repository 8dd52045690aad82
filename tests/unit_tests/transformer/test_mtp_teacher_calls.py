"""Objectives with a teacher in calls: messages, metrics, the overlap path, and flags.

    python -m pytest tests/unit_tests/transformer/test_mtp_teacher_calls.py
"""

import argparse
import dataclasses
import math

import pytest
import torch

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_model,
    cp_shard,
    parallel_world,
    prepare,
    run_ranks,
    thd_batch,
    worst_difference,
)
from tests.support.host_sync import HostSyncs
from tests.support.messages import noting_calls_of_the_objective
from tests.support.objective import step_gradients
from tests.support.overlap import overlap_spec, plan_gradients
from tests.support.release import loss_key, require_overlap_on_one_stage

prepare()

from megatron.core.transformer.mtp_objective.metrics import mtp_metrics
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training.arguments import add_megatron_arguments

SPEC = ModelSpec(hidden_size=16, num_attention_heads=2, dtype=torch.float32)
SAMPLED = dict(mtp_teacher_temperature=0.7, mtp_teacher_top_k=9, mtp_teacher_top_p=0.9)


def taught(spec=SPEC, **overrides):
    overrides = {"mtp_objective": "kl", **spec.overrides, **overrides}
    return dataclasses.replace(spec, overrides=overrides)


@pytest.fixture
def world():
    """Groups of one rank."""
    MTPLossLoggingHelper.tracker.clear()
    with parallel_world() as groups:
        yield groups


def messages(cp, overrides):
    """Per (depths, sequences): transports that files of the objective call in a training step."""
    found = {}
    for depths, sequences in ((1, 1), (4, 1), (2, 12)):
        with parallel_world(cp=cp) as groups:
            MTPLossLoggingHelper.tracker.clear()
            model = build_model(taught(ModelSpec(mtp_num_layers=depths), **overrides))
            batch = thd_batch((2 * cp,) * sequences, None)
            kwargs = cp_shard(batch, cp, groups.cp.rank()).forward_kwargs()
            called = []
            with noting_calls_of_the_objective(called):
                model(**kwargs).sum().backward()
            found[depths, sequences] = called
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_boundary_rows_of_all_depths_and_sequences_travel_in_one_message(cp):
    for rank in run_ranks(messages, cp, cp, dict(SAMPLED, mtp_depth_weighting="chained")):
        # Fields of the microbatch, and rows of the decoder.
        assert rank == dict.fromkeys(rank, ["all_gather_into_tensor"] * 2)


@pytest.mark.parametrize("overrides", [{}, SAMPLED], ids=["plain", "sampled"])
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_a_training_step_makes_the_host_wait_no_more_than_one_without_heads(
    world, family, overrides
):
    kwargs, found = bshd_batch(2, 16, "prompt").forward_kwargs(), []
    spec = taught(dataclasses.replace(SPEC, family=family), **overrides)
    model = build_model(spec)
    model(**kwargs).sum().backward()  # creates the tracker
    for on in (False, True):
        with HostSyncs() as syncs:
            model(**kwargs, compute_mtp_loss=on).sum().backward()
        found.append(syncs.names)
    assert found[1] == found[0]


def through_a_plan():
    with parallel_world(ep=2):
        spec = taught(overlap_spec(isolated=True), mtp_loss_chunk_size=3)
        kwargs, model = bshd_batch(2, 8).forward_kwargs(), build_model(spec)
        return plan_gradients(model, 0.0, **kwargs), step_gradients(model, None, 0.0, **kwargs)


def test_a_schedule_plan_has_a_teacher_too():
    require_overlap_on_one_stage()
    for plan, forward in run_ranks(through_a_plan, 2):
        assert worst_difference(plan, forward)[0] == 0.0


def measured(tp, cp):
    """Expected acceptance and length of one batch."""
    with parallel_world(tp=tp, cp=cp) as groups:
        MTPLossLoggingHelper.tracker.clear()
        spec = dataclasses.replace(SPEC, dtype=torch.float64, num_attention_heads=4)
        model = build_model(taught(spec, **SAMPLED))
        batch = cp_shard(bshd_batch(2, 16, "prompt"), cp, groups.cp.rank())
        model(**batch.forward_kwargs()).sum().backward()
        return mtp_metrics(model).as_dict()


def test_expectations_are_reduced_over_ranks():
    (whole,) = run_ranks(measured, 1, 1, 1)
    assert 0 < whole["mtp_1_expected_acceptance"] < 1
    assert 1 < whole["mtp_expected_accepted_length"] < 3
    for tp, cp in ((2, 1), (1, 2), (2, 2)):
        for rank in run_ranks(measured, tp * cp, tp, cp):
            assert rank.keys() == whole.keys()
            for name, value in whole.items():
                assert rank[name] == pytest.approx(value, rel=1e-9)


def test_the_loss_that_is_logged_is_the_one_that_is_trained(world):
    model = build_model(taught(mtp_objective="tv"))
    model(**bshd_batch(2, 16, "prompt").forward_kwargs()).sum().backward()
    metrics = mtp_metrics(model)
    want = [1 - accepted for accepted in metrics.expected_acceptance]
    assert metrics.losses == pytest.approx(want, rel=1e-5)
    tracked = MTPLossLoggingHelper.tracker[loss_key()]
    assert tracked.tolist() == pytest.approx(want, rel=1e-5)


def test_without_a_teacher_nothing_is_expected(world):
    model = build_model(SPEC)
    model(**bshd_batch(2, 16).forward_kwargs()).sum().backward()
    metrics = mtp_metrics(model, reset=False)
    assert all(math.isnan(value) for value in metrics.expected_acceptance)
    assert math.isnan(metrics.expected_accepted_length)
    assert not any("expected" in name for name in metrics.as_dict())


def test_the_flags_reach_the_config():
    parser = argparse.ArgumentParser()
    add_megatron_arguments(parser)
    flags = (
        "--mtp-objective ce+tv --mtp-objective-weight 0.5 --mtp-teacher-temperature 0.8 "
        "--mtp-teacher-top-k 20 --mtp-teacher-top-p 0.95 --mtp-depth-weighting chained "
        "--mtp-depth-weights 1.0 0.5 --mtp-expected-acceptance"
    )
    found = parser.parse_args(flags.split())
    assert (found.mtp_objective, found.mtp_objective_weight) == ("ce+tv", 0.5)
    assert (found.mtp_teacher_temperature, found.mtp_teacher_top_k) == (0.8, 20)
    assert (found.mtp_teacher_top_p, found.mtp_depth_weighting) == (0.95, "chained")
    assert (found.mtp_depth_weights, found.mtp_expected_acceptance) == ([1.0, 0.5], True)
    defaults = parser.parse_args([])
    assert (defaults.mtp_objective, defaults.mtp_depth_weights) == ("ce", None)
