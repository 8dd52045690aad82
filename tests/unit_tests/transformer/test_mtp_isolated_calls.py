"""``mtp_isolated_loss`` of one forward call overrides the config, in both directions.

    python -m pytest tests/unit_tests/transformer/test_mtp_isolated_calls.py
"""

import itertools

import pytest
import torch

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_model,
    cp_shard,
    is_mtp_param,
    parallel_world,
    prepare,
    run_ranks,
    thd_batch,
)
from tests.support.objective import nonzero, step_gradients
from tests.support.release import require_derived_targets

prepare()

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

FAMILIES = ["gpt", "hybrid"]
# What the call passes beside the batch: an RL trainer with and without labels, and a plain one.
CALLS = {
    "logits-and-labels": dict(return_logits=True),
    "logits": dict(labels=None, loss_mask=None),
    "loss": {},
}
MATRIX = list(
    itertools.product(FAMILIES, [False, True], [1, 2], [False, True], ["none", "full", "selective"])
)


@pytest.fixture(scope="class")
def one_rank():
    with parallel_world():
        yield


@pytest.fixture(autouse=True)
def no_metrics_of_other_models():
    MTPLossLoggingHelper.tracker.clear()


def spec_of(family, tied=False, depths=2, repeated=False, recompute="none", **overrides):
    return ModelSpec(
        family=family,
        tied=tied,
        mtp_num_layers=depths,
        repeated=repeated,
        recompute=recompute,
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        overrides=overrides,
    )


def heads(gradients):
    return {name for name in gradients if is_mtp_param(name)}


@pytest.mark.usefixtures("one_rank")
class TestOneRank:
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("override", [None, False, True])
    @pytest.mark.parametrize("configured", [False, True], ids=["attached", "isolated"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_call_decides_and_none_follows_the_config(self, family, configured, override, call):
        if call == "logits":
            require_derived_targets()
        model = build_model(spec_of(family, mtp_isolated_loss=configured))
        batch = bshd_batch(batch=2, length=8)
        gradients = step_gradients(model, batch, mtp_isolated_loss=override, **CALLS[call])
        isolated = configured if override is None else override
        assert nonzero(gradients) == (heads(gradients) if isolated else set(gradients))

    @pytest.mark.parametrize("family, tied, depths, repeated, recompute", MATRIX)
    def test_a_call_that_isolates_leaves_all_other_gradients_as_without_the_objective(
        self, family, tied, depths, repeated, recompute
    ):
        model = build_model(spec_of(family, tied, depths, repeated, recompute))
        batch = bshd_batch(batch=2, length=8)
        rl = dict(return_logits=True, mtp_isolated_loss=True)
        alone = step_gradients(model, batch, main_weight=0.0, **rl)
        assert nonzero(alone) == heads(alone)
        trained = step_gradients(model, batch, main_weight=1.0, **rl)
        off = step_gradients(model, batch, main_weight=1.0, compute_mtp_loss=False, **rl)
        assert nonzero(off) == off.keys() - heads(off)
        for name in off:
            want = alone if is_mtp_param(name) else off
            assert torch.equal(trained[name], want[name]), name
        leaking = step_gradients(model, batch, main_weight=0.0, return_logits=True)
        assert nonzero(leaking) == set(leaking)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_one_model_can_isolate_one_call_and_not_the_next(self, family):
        model, batch = build_model(spec_of(family)), thd_batch((7, 3), (8, 4))
        first = step_gradients(model, batch, mtp_isolated_loss=True)
        second = step_gradients(model, batch)
        third = step_gradients(model, batch, mtp_isolated_loss=True)
        assert nonzero(second) == set(second)
        assert nonzero(first) == nonzero(third) == heads(first)
        assert all(torch.equal(first[name], third[name]) for name in first)

    def test_a_call_isolates_gradients_but_forms_no_gradient_norm_group(self):
        model = build_model(spec_of("gpt"))
        step_gradients(model, bshd_batch(batch=2, length=8), mtp_isolated_loss=True)
        assert not any(hasattr(parameter, "grad_norm_group") for parameter in model.parameters())


def isolated_on_rank(cp):
    """Names of non-zero gradients on a context-parallel rank that differ from all the heads."""
    found = {}
    with parallel_world(cp=cp) as groups:
        for family, configured, layout in itertools.product(FAMILIES, (False, True), range(2)):
            batch = [bshd_batch(2, 16), thd_batch((7, 3), (8, 8))][layout]
            model = build_model(spec_of(family, mtp_isolated_loss=configured))
            gradients = step_gradients(
                model,
                cp_shard(batch, cp, groups.cp.rank()),
                return_logits=True,
                mtp_isolated_loss=None if configured else True,
            )
            found[family, configured, layout] = nonzero(gradients) ^ heads(gradients)
    return found


def test_context_parallel_ranks_are_isolated_alike():
    for rank in run_ranks(isolated_on_rank, 2, 2):
        assert rank == dict.fromkeys(rank, set())
        assert len(rank) == 8
