"""Heads read the embeddings they were given on any split, as ids of a table do on one rank.

    python -m pytest tests/unit_tests/transformer/test_mtp_given_embeddings_ranks.py
"""

import functools
import itertools

import pytest

from tests.support import prepare, run_ranks, worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero
from tests.support.parallel_faults import padding_mask
from tests.support.release import require_padding_mask
from tests.support.split import heads_of
from tests.support.vision import (
    EMBEDDING,
    GIVEN,
    VisionCase,
    embedded_gradients,
    given_gradients_of,
)

prepare()

AXIS = "Given embeddings (vision-language batches)"
SP = dict(sequence_parallel=True)
ISOLATED = dict(mtp_isolated_loss=True)
CHUNKED = dict(mtp_loss_chunk_size=3)
# fields of the model, config
VARIANTS = {
    "attached": ({}, {}),
    "isolated": ({}, ISOLATED),
    "3 repeated depths, per-token": (
        dict(mtp_num_layers=3, repeated=True, per_token=True),
        {},
    ),
    "1 depth, full recompute": (dict(mtp_num_layers=1, recompute="full"), {}),
    "full recompute, isolated": (dict(recompute="full"), ISOLATED),
}
FEW = {"one rank": ({}, {}), "CP=2": (dict(cp=2), {})}
MANY = {
    "TP=2": (dict(tp=2), {}),
    "TP=2 SP": (dict(tp=2), SP),
    "CP=4": (dict(cp=4), {}),
    "TP=2 SP with CP=2": (dict(tp=2, cp=2), SP),
}
FAMILIES = ("gpt", "hybrid")
LAYOUTS = ("bshd", "thd")
EXPERTS = dict(
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=0.1,
    moe_token_dispatcher_type="alltoall",
)


def _case(split, family, layout, variant):
    (sizes, more), (fields, overrides) = {**FEW, **MANY}[split], VARIANTS[variant]
    whole = sizes.get("cp", 1) == 1  # the main loss is weighted by place in a rank's output
    return VisionCase(
        sizes,
        dict(family=family, **fields),
        {**more, **overrides},
        layout,
        main_weight=1.0 if whole and "isolated" not in variant else 0.0,
    )


def _with_experts(sizes, overrides, family):
    fields = dict(family=family, num_experts=4)
    mask = dict(padding_mask=padding_mask())
    return VisionCase(sizes, fields, {**EXPERTS, **overrides}, forward=mask)


OTHERS = {
    "one rank, gpt, chunked": VisionCase({}, {}, CHUNKED),
    "CP=2, gpt, chunked": VisionCase(dict(cp=2), {}, CHUNKED, main_weight=0.0),
    "CP=2, hybrid, packed, chunked": VisionCase(
        dict(cp=2), dict(family="hybrid"), CHUNKED, "thd", main_weight=0.0
    ),
    # The last label alone counts: one rank of two has no supervised row, and still takes part.
    "CP=2, gpt, chunked, a rank without targets": VisionCase(
        dict(cp=2), dict(mtp_num_layers=1), CHUNKED, main_weight=0.0, mask="one-hot"
    ),
    "one rank, gpt, experts with a padding mask": _with_experts({}, {}, "gpt"),
    "TP=2 SP, gpt, experts with a padding mask": _with_experts(dict(tp=2), SP, "gpt"),
    "TP=2 SP, hybrid, experts with a padding mask": _with_experts(dict(tp=2), SP, "hybrid"),
}
ALL = [
    *itertools.product(FEW, FAMILIES, LAYOUTS, VARIANTS),
    *itertools.product(MANY, FAMILIES, LAYOUTS, ("attached", "isolated")),
]
CASES = {**{key: _case(*key) for key in ALL}, **OTHERS}


@functools.cache
def _of_world(ranks):
    cases = {name: case for name, case in CASES.items() if case.ranks == ranks}
    if ranks == 1:
        return given_gradients_of(cases)
    return run_ranks(given_gradients_of, ranks, cases, timeout=60 + 10 * len(cases))[0]


def _check(key, isolated):
    got, want = _of_world(CASES[key].ranks)[key], embedded_gradients(CASES[key])
    assert worst_difference(got, want)[0] <= 1e-12
    if isolated:
        assert nonzero(got) == set(heads_of(want))
    else:
        # No token may choose an expert.
        unused = {name for name in want if ".experts." in name} - nonzero(want)
        assert nonzero(got) == set(want) - {EMBEDDING} - unused
        assert GIVEN in nonzero(got)


@supports(AXIS, agrees=1e-12, ranks="1 and 2")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", FEW)
def test_gradients_are_those_of_a_table_that_embeds_the_tokens(split, family, layout, variant):
    _check((split, family, layout, variant), "isolated" in variant)


@supports(AXIS, agrees=1e-12, ranks="2 and 4")
@pytest.mark.parametrize("variant", ["attached", "isolated"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", MANY)
def test_gradients_of_further_splits_are_too(split, family, layout, variant):
    _check((split, family, layout, variant), "isolated" in variant)


@supports(AXIS, agrees=1e-12, ranks="1 and 2")
@pytest.mark.parametrize("case", OTHERS)
def test_chunks_and_padding_masks_go_with_given_embeddings(case):
    if "padding mask" in case:
        require_padding_mask()
    _check(case, isolated=False)
