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
    "chunked": ({}, CHUNKED),
}
SPLITS = {
    "one rank": (dict(), {}),
    "CP=2": (dict(cp=2), {}),
    "TP=2": (dict(tp=2), {}),
    "TP=2 SP": (dict(tp=2), SP),
    "CP=4": (dict(cp=4), {}),
    "TP=2 SP with CP=2": (dict(tp=2, cp=2), SP),
}
FAMILIES = ("gpt", "hybrid")


def _cases():
    for split, family, layout, variant in itertools.product(
        SPLITS, FAMILIES, ("bshd", "thd"), VARIANTS
    ):
        (sizes, more), (fields, overrides) = SPLITS[split], VARIANTS[variant]
        if split not in ("one rank", "CP=2") and variant not in ("attached", "isolated"):
            continue
        if (split == "CP=4" and layout == "thd") or (layout, variant) == ("thd", "chunked"):
            continue
        whole = sizes.get("cp", 1) == 1  # the main loss is weighted by place in a rank's output
        yield f"{split}, {family}, {layout}, {variant}", VisionCase(
            sizes,
            dict(family=family, **fields),
            {**more, **overrides},
            layout,
            main_weight=1.0 if whole and "isolated" not in variant else 0.0,
        )
    # The last label alone counts: one rank of two has no supervised row, and still takes part.
    yield "CP=2, gpt, bshd, chunked, a rank without targets", VisionCase(
        dict(cp=2), dict(mtp_num_layers=1), CHUNKED, main_weight=0.0, mask="one-hot"
    )
    experts = dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1)
    experts["moe_token_dispatcher_type"] = "alltoall"
    for split, family in itertools.product(("one rank", "TP=2 SP"), FAMILIES):
        sizes, more = SPLITS[split]
        yield f"{split}, {family}, bshd, experts with a padding mask", VisionCase(
            sizes,
            dict(family=family, num_experts=4),
            {**more, **experts},
            forward=dict(padding_mask=padding_mask()),
        )


CASES = dict(_cases())


@functools.cache
def _of_world(ranks):
    cases = {name: case for name, case in CASES.items() if case.ranks == ranks}
    if ranks == 1:
        return given_gradients_of(cases)
    return run_ranks(given_gradients_of, ranks, cases, timeout=60 + 10 * len(cases))[0]


@supports("Given embeddings (vision-language batches)", agrees=1e-12, ranks="1 to 4")
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_a_table_that_embeds_the_tokens(case):
    if "padding mask" in case:
        require_padding_mask()
    got, want = _of_world(CASES[case].ranks)[case], embedded_gradients(CASES[case])
    assert worst_difference(got, want)[0] <= 1e-12
    if "isolated" in case:
        assert nonzero(got) == set(heads_of(want))
    else:
        # No token may choose an expert.
        unused = {name for name in want if ".experts." in name} - nonzero(want)
        assert nonzero(got) == set(want) - {EMBEDDING} - unused
        assert GIVEN in nonzero(got)
