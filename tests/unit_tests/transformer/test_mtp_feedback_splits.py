"""States fed back before the closing norm: split models give the gradients of one rank.

    python -m pytest tests/unit_tests/transformer/test_mtp_feedback_splits.py
"""

import itertools

import pytest

from tests.support import bshd_batch, build_model, parallel_world, prepare, run_ranks
from tests.support import worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero, step_gradients
from tests.support.overlap import overlap_spec, plan_gradients
from tests.support.release import require_overlap_on_one_stage
from tests.support.split import Comparison, SplitCase, heads_of

prepare()

PRE = dict(mtp_hidden_feedback="pre-norm")
ISOLATED = dict(mtp_isolated_loss=True)


def _cases():
    for family, layout in itertools.product(("gpt", "hybrid"), ("bshd", "thd")):
        repeated = dict(family=family, repeated=True)
        yield f"CP=2, {family}, {layout}", SplitCase(
            dict(cp=2), repeated, PRE, layout, main_weight=0.0
        )
    for family in ("gpt", "hybrid"):
        repeated = dict(family=family, repeated=True)
        overrides = {**PRE, **ISOLATED, "sequence_parallel": True}
        yield f"TP=2 SP, {family}, isolated", SplitCase(
            dict(tp=2), repeated, overrides, main_weight=0.0
        )
        yield f"PP=2, {family}, tied", SplitCase(dict(pp=2), dict(family=family, tied=True), PRE)
    alone = dict(PRE, pipeline_model_parallel_layout="Ett|mm|L")
    yield "PP=3, gpt, heads on a stage of their own", SplitCase(dict(pp=3), {}, alone)
    yield "EP=2, gpt", SplitCase(
        dict(ep=2),
        dict(num_experts=4, repeated=True),
        {**PRE, "moe_token_dispatcher_type": "alltoall"},
    )


COMPARISON = Comparison(dict(_cases()))


@supports("States fed back before the norm", agrees=1e-12, ranks="2 and 3")
@pytest.mark.parametrize("case", COMPARISON.cases)
def test_gradients_of_a_split_model_are_those_of_one_rank(case):
    got, want = COMPARISON.of(case)
    assert worst_difference(got, want)[0] <= 1e-12
    assert nonzero(got) == set(heads_of(want) if "isolated" in case else want)


def _overlapped():
    with parallel_world(ep=2):
        model = build_model(overlap_spec(overrides=PRE))
        forward = bshd_batch(2, 8).forward_kwargs()
        return step_gradients(model, None, 1.0, **forward), plan_gradients(model, 1.0, **forward)


def test_the_1f1b_overlap_path_which_has_one_depth_computes_what_forward_computes():
    require_overlap_on_one_stage()
    for want, got in run_ranks(_overlapped, 2):
        assert worst_difference(got, want)[0] == 0.0
