"""The 1F1B expert-overlap path computes what ``forward`` computes, isolation and arguments included.

    python -m pytest tests/unit_tests/transformer/test_mtp_overlap.py
"""

import functools
import itertools
from pathlib import Path

import pytest
import torch

from tests.support import (
    bshd_batch,
    build_model,
    is_mtp_param,
    parallel_world,
    prepare,
    run_ranks,
    worst_difference,
)
from tests.support import overlap
from tests.support.claims import supports
from tests.support.objective import nonzero, step_gradients
from tests.support.overlap import overlap_spec, plan_gradients
from tests.support.pipeline import build_stages, schedule_gradients, world_options
from tests.support.release import require_derived_targets, require_overlap_on_one_stage
from tests.support.unpatched import NoUnpatchedTree, faulty_tree, run_in_tree

prepare()

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

CALLS = {
    "labels": {},
    "no labels": dict(labels=None),
    "return_logits": dict(return_logits=True),
    "isolated by the call": dict(mtp_isolated_loss=True),
    "not isolated by the call": dict(mtp_isolated_loss=False),
    "normalizer": dict(mtp_loss_normalizer=7.0),
    "compute_mtp_loss off": dict(compute_mtp_loss=False),
}
SCHEDULES = {
    "one stage": (1, {}),
    "PP=2, interleaved": (
        2,
        dict(
            virtual_pipeline_model_parallel_size=2,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
        ),
    ),
}


@functools.cache
def _every_call(isolated, tied):
    """Per rank, {(call, weight of the main loss): (gradients of forward, of the plan)}."""
    return run_ranks(_compare_calls, 2, isolated, tied)


def _compare_calls(isolated, tied):
    found = {}
    with parallel_world(ep=2):
        model = build_model(overlap_spec(isolated, tied=tied))
        for (call, changed), weight in itertools.product(CALLS.items(), (0.0, 1.0)):
            forward = {**bshd_batch(2, 8).forward_kwargs(), **changed}
            MTPLossLoggingHelper.tracker.clear()
            want = step_gradients(model, None, weight, **forward)
            tracked = sorted(MTPLossLoggingHelper.tracker)
            MTPLossLoggingHelper.tracker.clear()
            found[call, weight] = want, plan_gradients(model, weight, **forward)
            assert sorted(MTPLossLoggingHelper.tracker) == tracked
    return found


@supports("1F1B expert overlap", equal="`forward`", ranks="EP=2 on 2")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("isolated", [False, True], ids=["attached", "isolated"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_schedule_plan_gives_the_gradients_of_forward(tied, isolated, call):
    require_overlap_on_one_stage()
    if call == "no labels":
        require_derived_targets()
    cut = CALLS[call].get("mtp_isolated_loss", isolated)
    for rank in _every_call(isolated, tied):
        for weight in (0.0, 1.0):
            want, got = rank[call, weight]
            assert worst_difference(got, want)[0] == 0.0
            heads = {name for name in want if is_mtp_param(name)}
            if call == "compute_mtp_loss off":
                assert nonzero(got) == (set() if weight == 0.0 else nonzero(want) - heads)
            elif weight == 0.0 and cut:
                assert nonzero(got) <= heads
                # All but the experts of this rank that no token chose.
                assert {n for n in heads - nonzero(got) if ".experts." not in n} == set()


def _through_the_schedule(pp, ep, isolated, per_token, overrides, **forward):
    overrides = dict(overrides)
    if ep == 1:
        overrides = dict(overlap_moe_expert_parallel_comm=False)
    spec = overlap_spec(isolated, num_layers=4, per_token=per_token)
    spec.overrides.update(overrides)
    batches = [bshd_batch(2, 8, mask) for mask in ("full", "prompt", "one-hot", "full")]
    with parallel_world(ep=ep, pp=pp, **world_options(spec, pp)) as groups:
        stages = build_stages(spec, groups)
        gradients = schedule_gradients(stages, groups, batches, 1.0, **forward)
        return {name: gradient / groups.dp.size() for name, gradient in gradients.items()}


@supports("1F1B expert overlap", agrees=1e-12, ranks="EP=2 on 2 and 4")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("isolated", [False, True], ids=["attached", "isolated"])
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per-token"])
def test_the_combined_schedule_agrees_with_one_rank(per_token, isolated, schedule):
    pp, overrides = SCHEDULES[schedule]
    if pp == 1:
        require_overlap_on_one_stage()
    want = _through_the_schedule(1, 1, isolated, per_token, {})
    got = run_ranks(_through_the_schedule, 2 * pp, pp, 2, isolated, per_token, overrides)[0]
    assert worst_difference(got, want)[0] <= 1e-12


def test_the_unpatched_release_leaks_into_the_backbone_and_shifts_the_targets_twice(tmp_path):
    try:
        tree = faulty_tree(tmp_path / "unpatched")
    except NoUnpatchedTree as reason:
        pytest.skip(str(reason))
    run_in_tree(tree, Path(overlap.__file__), [tmp_path / "found.pt"])
    found = torch.load(tmp_path / "found.pt")
    leaked = {name for name in nonzero(found["plan, labels"]) if not is_mtp_param(name)}
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in leaked
    assert {name for name in nonzero(found["forward, labels"]) if not is_mtp_param(name)} == set()
    heads = {name for name in found["plan, labels"] if is_mtp_param(name)}

    def of_heads(what):
        return {name: found[what][name] for name in heads}

    assert worst_difference(of_heads("plan, labels"), of_heads("forward, labels"))[0] == 0.0
    assert worst_difference(of_heads("plan, no labels"), of_heads("forward, no labels"))[0] > 0.01

    found = run_ranks(overlap.isolated_gradients, 2)[0]
    for case in ("labels", "no labels"):
        assert worst_difference(found[f"plan, {case}"], found[f"forward, {case}"])[0] == 0.0
