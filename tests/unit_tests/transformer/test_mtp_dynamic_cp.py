"""Dynamic context parallelism: the batch says which ranks share its sequences.

    python -m pytest tests/unit_tests/transformer/test_mtp_dynamic_cp.py

Four data-parallel ranks without context parallelism of their own; two groups of two take one packed
row each.
"""

import functools
import itertools

import pytest
import torch.distributed as dist

from tests.support import ModelSpec, build_model, cp_shard, fp64_cross_entropy, parallel_world
from tests.support import prepare, run_ranks, thd_batch, worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero, step_gradients
from tests.support.split import heads_of
from tests.support.whole_gradients import whole_gradients

prepare()

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

CP = 2
GLOBAL = dict(mtp_loss_normalization="global")
# per_token, config, arguments of forward
WEIGHTS = {
    "per-token": (True, {}, {}),
    "mean": (False, {}, {}),
    "per-token, global": (True, GLOBAL, {}),
    "mean, global with normalizer": (False, GLOBAL, dict(mtp_loss_normalizer=7.0)),
    "per-token, normalizer": (True, {}, dict(mtp_loss_normalizer=7.0)),
}
CASES = list(itertools.product(("gpt", "hybrid"), ("attached", "isolated"), WEIGHTS))


def _batches():
    return [thd_batch((7, 3), (8, 4)), thd_batch((4, 11), (4, 12), "prompt")]


def _spec(family, heads, weight):
    per_token, config, _ = WEIGHTS[weight]
    overrides = dict(config, mtp_isolated_loss=heads == "isolated")
    return ModelSpec(family=family, per_token=per_token, hidden_size=16, overrides=overrides)


def _dynamic():
    """Rank function: gradients of every case, summed over all ranks."""
    found = {}
    with fp64_cross_entropy(), parallel_world() as groups:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        batch, pair = _batches()[dist.get_rank() // CP], pairs[dist.get_rank() // CP]
        params = batch.packed_seq_params
        params.cp_group, params.local_cp_size = pair, CP
        mine = cp_shard(batch, CP, pair.rank())
        for case in CASES:
            forward = WEIGHTS[case[2]][2]
            model = build_model(_spec(*case))
            step_gradients(model, mine, packed_seq_params=params, **forward)
            found[case] = whole_gradients([model], groups)
            MTPLossLoggingHelper.tracker.clear()
        for group in pairs:
            dist.destroy_process_group(group)
    return found


@functools.cache
def _found():
    return run_ranks(_dynamic, 4, timeout=180)[0]


@supports("Dynamic context parallel, CP=2 of 4 data-parallel ranks", agrees=1e-12, ranks=4)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("heads", ["attached", "isolated"])
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_a_context_parallel_group_of_the_batch_gives_the_gradients_of_one_rank(
    family, heads, weight
):
    forward = WEIGHTS[weight][2]
    with fp64_cross_entropy(), parallel_world():
        model = build_model(_spec(family, heads, weight))
        each = [step_gradients(model, batch, **forward) for batch in _batches()]
    MTPLossLoggingHelper.tracker.clear()
    # Data parallelism takes the mean over four ranks of two rows: a mean loss counts CP times.
    times = CP if weight == "mean" else 1
    want = {name: times * (each[0][name] + each[1][name]) for name in each[0]}
    got = _found()[family, heads, weight]
    assert worst_difference(got, want)[0] <= 1e-12
    assert nonzero(got) == (set(heads_of(want)) if heads == "isolated" else set(want))
