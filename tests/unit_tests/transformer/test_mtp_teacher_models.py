"""Objectives with a teacher on split models: gradients are those of one rank.

    python -m pytest tests/unit_tests/transformer/test_mtp_teacher_models.py
"""

import itertools

import pytest

from tests.support import prepare, worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero
from tests.support.split import Comparison, SplitCase, heads_of

prepare()

SP = dict(sequence_parallel=True)
CHAINED = dict(mtp_depth_weighting="chained")
SAMPLED = dict(mtp_teacher_temperature=0.7, mtp_teacher_top_k=20, mtp_teacher_top_p=0.9)


def objective(name, **overrides):
    """TransformerConfig fields."""
    weight = dict(mtp_objective_weight=0.3) if "+" in name else {}
    return dict(mtp_objective=name, **weight, **overrides)


def _cases():
    for name, isolated in itertools.product(("kl", "tv", "ce+kl", "ce+tv"), (False, True)):
        text = f"{name}, isolated" if isolated else name
        fields = objective(name, **SAMPLED, mtp_isolated_loss=isolated)
        yield f"TP=2, {text}", SplitCase(dict(tp=2), {}, dict(fields, mtp_loss_chunk_size=3))
        for cp, layout in itertools.product((2, 4), ("bshd", "thd")):
            if cp == 4 and isolated:
                continue
            layout_text = "packed" if layout == "thd" else "rows"
            yield f"CP={cp}, {layout_text}, {text}", SplitCase(
                dict(cp=cp), {}, dict(fields, mtp_loss_chunk_size=3), layout, main_weight=0.0
            )
    for family in ("gpt", "hybrid"):
        fields = dict(family=family)
        yield f"TP=2 SP, {family}, tied, tv chained", SplitCase(
            dict(tp=2), dict(fields, tied=True), objective("tv", **SAMPLED, **SP, **CHAINED)
        )
        yield f"TP=2 SP with CP=2, {family}, packed, ce+kl chained", SplitCase(
            dict(tp=2, cp=2),
            fields,
            objective("ce+kl", **SAMPLED, **SP, **CHAINED, mtp_loss_chunk_size=4),
            "thd",
            main_weight=0.0,
        )
        yield f"PP=2, {family}, tied, kl", SplitCase(
            dict(pp=2), dict(fields, tied=True), objective("kl")
        )
        yield f"CP=2, {family}, packed, per-token, path mask, ce chained", SplitCase(
            dict(cp=2),
            dict(fields, per_token=True),
            dict(CHAINED, mtp_loss_mask_mode="path", mtp_loss_chunk_size=3),
            "thd",
            main_weight=0.0,
        )
    yield "PP=3, heads on a stage of their own, gpt, tv chained", SplitCase(
        dict(pp=3), {}, objective("tv", **CHAINED, pipeline_model_parallel_layout="Ett|mm|L")
    )
    yield "recompute, repeated, gpt, kl, weighted depths", SplitCase(
        dict(tp=2),
        dict(recompute="full", repeated=True),
        objective("kl", mtp_depth_weights=[1.0, 0.5]),
    )
    yield "TP=2, MuP, gpt, ce+tv", SplitCase(
        dict(tp=2),
        {},
        objective("ce+tv", use_mup=True, mup_width_mult=2.0, mup_output_mult=0.5),
    )
    yield "TP=2, normalizer, gpt, kl", SplitCase(
        dict(tp=2), {}, objective("kl"), forward=dict(mtp_loss_normalizer=5.0)
    )
    yield "DP=2 with CP=2, gpt, kl, global normalization", SplitCase(
        dict(cp=2, dp=2),
        dict(per_token=True),
        objective("kl", mtp_loss_normalization="global"),
        main_weight=0.0,
    )


COMPARISON = Comparison(dict(_cases()))


@supports("Policy as teacher", agrees=1e-12, ranks="2 to 4")
@pytest.mark.parametrize("case", COMPARISON.cases)
def test_gradients_of_heads_taught_by_the_policy_are_those_of_one_rank(case):
    got, want = COMPARISON.of(case)
    assert worst_difference(got, want)[0] <= 1e-12
    if "isolated" not in case:
        assert nonzero(got) == set(want)
    else:
        assert set(heads_of(want)) <= nonzero(got)
