"""Gradients of the chunked objective are those of whole logits, split or not.

    python -m pytest tests/unit_tests/transformer/test_mtp_chunked_models.py
"""

import itertools

import pytest

from tests.support import prepare, worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero
from tests.support.split import Comparison, SplitCase, heads_of

prepare()

ISOLATED = dict(mtp_isolated_loss=True)
SP = dict(sequence_parallel=True)


def chunks(size, **overrides):
    """TransformerConfig fields; the model that a case is compared with does not get the size."""
    return dict(mtp_loss_chunk_size=size, **overrides)


def _cases():
    for family, tied, isolated in itertools.product(("gpt", "hybrid"), (False, True), (False, True)):
        name = ", ".join(
            [family, "tied" if tied else "untied", *(["isolated"] if isolated else [])]
        )
        overrides = ISOLATED if isolated else {}
        fields = dict(family=family, tied=tied)
        yield f"chunks of 3, {name}", SplitCase({}, fields, chunks(3, **overrides))
        yield f"TP=2, {name}", SplitCase(dict(tp=2), fields, chunks(3, **overrides))
    for family in ("gpt", "hybrid"):
        fields = dict(family=family)
        yield f"chunks of 1, {family}, packed, per-token", SplitCase(
            {}, dict(fields, per_token=True), chunks(1), "thd"
        )
        yield f"a chunk larger than all rows, {family}, repeated", SplitCase(
            {}, dict(fields, repeated=True), chunks(1000)
        )
        yield f"path mask, {family}", SplitCase({}, fields, chunks(4, mtp_loss_mask_mode="path"))
        yield f"normalizer, {family}", SplitCase(
            {}, fields, chunks(4), forward=dict(mtp_loss_normalizer=5.0)
        )
        yield f"TP=2 SP, {family}, tied", SplitCase(
            dict(tp=2), dict(fields, tied=True), chunks(5, **SP)
        )
        yield f"CP=2, {family}", SplitCase(
            dict(cp=2), fields, chunks(3), main_weight=0.0
        )
        yield f"CP=2, {family}, packed, per-token, path mask", SplitCase(
            dict(cp=2),
            dict(fields, per_token=True),
            chunks(3, mtp_loss_mask_mode="path"),
            "thd",
            main_weight=0.0,
        )
        yield f"TP=2 SP with CP=2, {family}, packed", SplitCase(
            dict(tp=2, cp=2), fields, chunks(3, **SP), "thd", main_weight=0.0
        )
        yield f"PP=2, {family}, tied", SplitCase(dict(pp=2), dict(fields, tied=True), chunks(3))
    yield "recompute, gpt", SplitCase({}, dict(recompute="full"), chunks(3))
    yield "MuP, gpt", SplitCase(
        {}, {}, chunks(3, use_mup=True, mup_width_mult=2.0, mup_output_mult=0.5)
    )
    yield "PP=3, heads on a stage of their own, gpt", SplitCase(
        dict(pp=3), {}, chunks(3, pipeline_model_parallel_layout="Ett|mm|L")
    )


COMPARISON = Comparison(dict(_cases()))


@supports("Chunked objective", agrees=1e-12, ranks="1 to 4")
@pytest.mark.parametrize("case", COMPARISON.cases)
def test_gradients_in_chunks_are_those_of_whole_logits_on_one_rank(case):
    got, want = COMPARISON.of(case)
    assert worst_difference(got, want)[0] <= 1e-12
    if "isolated" not in case:
        assert nonzero(got) == set(want)
    else:
        assert set(heads_of(want)) <= nonzero(got)
