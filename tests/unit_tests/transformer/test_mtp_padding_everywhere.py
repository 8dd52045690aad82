"""A padding mask reaches the experts of every head: HybridModel, later stages, sharded sequences.

    python -m pytest tests/unit_tests/transformer/test_mtp_padding_everywhere.py
"""

import pytest

from tests.support import ModelSpec, bshd_batch, build_model, parallel_world, prepare
from tests.support import worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero, step_gradients
from tests.support.parallel_faults import padding_mask
from tests.support.release import require_padding_mask
from tests.support.rows import look_ahead
from tests.support.split import Comparison, SplitCase, heads_of

prepare()

FAMILIES = ("gpt", "hybrid")
EXPERTS = dict(num_experts=4, num_layers=1, hidden_size=16)
BALANCED = dict(moe_aux_loss_coeff=0.1, moe_token_dispatcher_type="alltoall")


def build(family):
    overrides = dict(BALANCED, moe_router_load_balancing_type="aux_loss")
    return build_model(ModelSpec(family=family, overrides=overrides, **EXPERTS))


@pytest.fixture
def one_rank():
    with parallel_world():
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_every_head_routes_with_the_mask_of_the_tokens_it_reads(one_rank, family):
    """Head k reads the tokens k further on; behind the end of the row upstream takes none for
    padding."""
    require_padding_mask()
    model, seen = build(family), []
    routers = [module for name, module in model.mtp.named_modules() if name.endswith("router")]
    for router in routers:
        router.register_forward_pre_hook(lambda _router, given: seen.append(given[1]))
    step_gradients(model, bshd_batch(2, 8), padding_mask=padding_mask())
    rows = padding_mask().long().tolist()
    want = [[look_ahead(row, depth, [(0, 8)]) for row in rows] for depth in (1, 2)]
    assert [mask.T.long().tolist() for mask in seen] == want


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mask_changes_what_the_experts_of_the_heads_learn(one_rank, family):
    require_padding_mask()
    model = build(family)
    without = step_gradients(model, bshd_batch(2, 8))
    masked = step_gradients(model, bshd_batch(2, 8), padding_mask=padding_mask())
    changed = nonzero({name: masked[name] - without[name] for name in masked})
    assert {n for n in heads_of(masked) if n.endswith("router.weight")} <= changed


def _case(sizes, family, balancing):
    overrides = dict(
        BALANCED,
        moe_router_load_balancing_type=balancing,
        sequence_parallel="tp" in sizes,
    )
    fields = dict(EXPERTS, family=family, num_layers=sizes.get("pp", 1))
    return SplitCase(sizes, fields, overrides, forward=dict(padding_mask=padding_mask()))


SPLITS = {"TP=2 SP": dict(tp=2), "PP=2": dict(pp=2), "TP=2 SP with PP=2": dict(tp=2, pp=2)}
CASES = {
    (split, family, balancing): _case(sizes, family, balancing)
    for split, sizes in SPLITS.items()
    for family in FAMILIES
    for balancing in ("aux_loss", "seq_aux_loss")
}
COMPARISON = Comparison(CASES)


@supports("Padding mask of experts", agrees=1e-12, ranks="2 and 4")
@pytest.mark.parametrize("balancing", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", SPLITS)
def test_gradients_with_a_padding_mask_are_those_of_one_rank(split, family, balancing):
    got, want = COMPARISON.of((split, family, balancing))
    assert worst_difference(got, want)[0] <= 1e-12
