"""Experts in the decoder and in the heads, split over ranks, give one rank's gradients.

    python -m pytest tests/unit_tests/transformer/test_mtp_expert_parallel.py
"""

import importlib.util
import itertools

import pytest

from tests.support import ModelSpec, build_model, parallel_world, prepare, run_ranks
from tests.support import worst_difference
from tests.support.claims import supports
from tests.support.split import Comparison, SplitCase, heads_of

prepare()


def _cases():
    for family, dispatcher, isolated in itertools.product(
        ("gpt", "hybrid"), ("allgather", "alltoall"), (False, True)
    ):
        words = ", isolated" if isolated else ""
        yield f"EP=2, {family}, {dispatcher}{words}", SplitCase(
            dict(ep=2),
            dict(family=family, num_experts=4),
            dict(moe_token_dispatcher_type=dispatcher, mtp_isolated_loss=isolated),
            main_weight=0.0 if isolated else 1.0,
        )
    for family in ("gpt", "hybrid"):
        overrides = dict(
            moe_token_dispatcher_type="alltoall",
            sequence_parallel=True,
            expert_tensor_parallel_size=1,
        )
        yield f"EP=2 over the ranks of TP=2 SP, {family}, alltoall", SplitCase(
            dict(tp=2, ep=2), dict(family=family, num_experts=4), overrides
        )
        yield f"EP=2 with PP=2, {family}, alltoall, packed, per-token", SplitCase(
            dict(ep=2, pp=2),
            dict(family=family, num_experts=4, per_token=True, tied=True),
            dict(moe_token_dispatcher_type="alltoall"),
            "thd",
        )


COMPARISON = Comparison(dict(_cases()))


@supports("Expert parallel", agrees=1e-12, ranks="2 and 4")
@pytest.mark.parametrize("case", COMPARISON.cases)
def test_gradients_of_split_experts_are_those_of_one_rank(case):
    got, want = COMPARISON.of(case)
    assert worst_difference(got, want)[0] <= 1e-12
    if "isolated" in case:
        assert all(not want[name].any() for name in set(want) - set(heads_of(want)))


def _build_flex():
    with parallel_world(ep=2):
        build_model(
            ModelSpec(num_experts=4, overrides=dict(moe_token_dispatcher_type="flex"))
        )


@supports("Expert parallel", refused="DeepEP is not installed", ranks=2)
@pytest.mark.parametrize("dispatcher", ["EP=2, flex dispatcher without its kernels"])
def test_the_flex_dispatcher_is_refused_where_its_kernels_are_missing(dispatcher):
    if importlib.util.find_spec("deep_ep") is not None:
        pytest.skip("DeepEP is installed here")
    with pytest.raises(AssertionError, match="DeepEP is not installed"):
        run_ranks(_build_flex, 2)
