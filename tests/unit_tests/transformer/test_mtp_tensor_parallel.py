"""Tensor and sequence parallelism, with a vocabulary-sharded head, give one rank's gradients.

    python -m pytest tests/unit_tests/transformer/test_mtp_tensor_parallel.py
"""

import itertools

import pytest

from tests.support import prepare, worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero
from tests.support.split import Comparison, SplitCase, heads_of

prepare()

SP = dict(sequence_parallel=True)
ISOLATED = dict(mtp_isolated_loss=True)


def _cases():
    for family, tied in itertools.product(("gpt", "hybrid"), (False, True)):
        fields = dict(family=family, tied=tied)
        tie = "tied" if tied else "untied"
        yield f"TP=2, {family}, {tie}", SplitCase(dict(tp=2), fields)
        yield f"TP=2 SP, {family}, {tie}", SplitCase(dict(tp=2), fields, SP)
        yield (
            f"TP=2 SP, {family}, {tie}, isolated, per-token, repeated",
            SplitCase(
                dict(tp=2),
                dict(fields, per_token=True, repeated=True),
                {**SP, **ISOLATED},
                main_weight=0.0,
            ),
        )
    for family in ("gpt", "hybrid"):
        fields = dict(family=family)
        yield f"TP=2 SP, {family}, packed", SplitCase(dict(tp=2), fields, SP, "thd")
        yield f"TP=4 SP, {family}", SplitCase(dict(tp=4), fields, SP)
        yield f"TP=2 SP with PP=2, {family}, tied", SplitCase(
            dict(tp=2, pp=2), dict(fields, tied=True), SP
        )
        for layout, per_token in (("bshd", False), ("thd", True)):
            words = "packed, per-token" if per_token else "mean"
            yield f"TP=2 SP with CP=2, {family}, {words}", SplitCase(
                dict(tp=2, cp=2), dict(fields, per_token=per_token), SP, layout, main_weight=0.0
            )
    yield "TP=2 with DP=2, gpt", SplitCase(dict(tp=2, dp=2), {}, SP)


COMPARISON = Comparison(dict(_cases()))


@supports("Tensor and sequence parallel", agrees=1e-12, ranks="2 and 4")
@pytest.mark.parametrize("case", COMPARISON.cases)
def test_gradients_of_a_tensor_parallel_split_are_those_of_one_rank(case):
    got, want = COMPARISON.of(case)
    assert worst_difference(got, want)[0] <= 1e-12
    if "isolated" in case:
        assert nonzero(got) == set(heads_of(want))
    else:
        assert nonzero(got) == set(want)
