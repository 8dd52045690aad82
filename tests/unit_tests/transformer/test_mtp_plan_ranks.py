"""One message per microbatch on context-parallel ranks, and counts that come with it.

    python -m pytest tests/unit_tests/transformer/test_mtp_plan_ranks.py
"""

import dataclasses
import random

import pytest
import torch

from tests.support import (
    ModelSpec,
    build_model,
    cp_shard,
    device,
    parallel_world,
    prepare,
    run_ranks,
    thd_batch,
)
from tests.support.messages import noting_calls_of_the_objective
from tests.support.rows import draw_row

prepare()

from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.shift import shift_and_sum, shift_fields

CP_SIZES = [2, 4]


def sums_of_random_rows(cp):
    """Seeds whose sums differ from those of the shifted fields, or from rank to rank."""
    differing = []
    with parallel_world(cp=cp) as groups:
        for seed in range(60):
            draw = random.Random(seed)
            row = draw_row(draw.randint, multiple=2 * cp)
            shifts = sorted(draw.sample(range(7), 3))
            if shifts[-1] == 0:
                continue
            dtype = draw.choice([torch.bool, torch.int64, torch.float64, torch.bfloat16])
            local = torch.tensor([row.part(row.values, cp, groups.cp.rank())], device=device())
            layout = SequenceLayout.of(local, row.packed_seq_params(), groups.cp)
            local = local.masked_fill(layout.position_T >= layout.length_N[layout.sequence_T], 0)
            local = (local % 3).to(dtype) if dtype == torch.bfloat16 else local.to(dtype)
            shifted, sums = shift_and_sum([local], shifts, layout)
            plain = shift_fields([local], shifts, layout)
            if not all(torch.equal(a[0], b[0]) for a, b in zip(shifted, plain)):
                differing.append((seed, "shift"))
            want = torch.stack([values[0].sum(dtype=torch.float64) for values in plain])
            torch.distributed.all_reduce(want, group=groups.cp)
            same = [torch.empty_like(sums) for _ in range(cp)]
            torch.distributed.all_gather(same, sums, group=groups.cp)
            if not torch.equal(sums.double(), want) or any(not torch.equal(s, sums) for s in same):
                differing.append((seed, dtype, shifts, sums.tolist(), want.tolist()))
    return differing


@pytest.mark.parametrize("cp", CP_SIZES)
def test_sums_are_those_of_the_shifted_field_over_all_ranks(cp):
    assert run_ranks(sums_of_random_rows, cp, cp) == [[]] * cp


def sums_of_fractions(cp):
    """Sums of a mask of fractions, as floats, in single and in double precision."""
    with parallel_world(cp=cp) as groups:
        whole = torch.linspace(0.1, 0.9, 32, dtype=torch.float64, device=device()).view(1, -1)
        batch = dataclasses.replace(thd_batch((32,), None), loss_mask=whole)
        mask = cp_shard(batch, cp, groups.cp.rank()).loss_mask
        group = groups.cp if cp > 1 else None
        layout = SequenceLayout.of(mask, cp_group=group)
        return [shift_and_sum([m], [0, 1, 2], layout)[1].tolist() for m in (mask, mask.float())]


def test_sums_of_fractions_do_not_depend_on_the_number_of_ranks():
    double, single = sums_of_fractions(1)
    for cp in CP_SIZES:
        ranks = run_ranks(sums_of_fractions, cp, cp)
        assert ranks == [ranks[0]] * cp
        assert ranks[0][0] == pytest.approx(double, rel=1e-15)
        assert ranks[0][1] == pytest.approx(single, rel=1e-7)


def messages_of_the_objective(cp, overrides):
    """(depths, sequences): transports that the MTP files call in forward and backward."""
    found = {}
    for depths, sequences in ((1, 1), (4, 1), (2, 12)):
        with parallel_world(cp=cp) as groups:
            model = build_model(ModelSpec(mtp_num_layers=depths, overrides=overrides))
            batch = thd_batch((2 * cp,) * sequences, None)
            kwargs = cp_shard(batch, cp, groups.cp.rank()).forward_kwargs()
            called = []
            with noting_calls_of_the_objective(called):
                model(**kwargs).sum().backward()
            found[depths, sequences] = called
    return found


@pytest.mark.parametrize("cp", CP_SIZES)
@pytest.mark.parametrize(
    "mask_mode, want",
    [
        ("target", ["all_gather_into_tensor"]),
        ("path", ["all_gather_into_tensor", "all_reduce"]),
    ],
)
def test_a_microbatch_costs_one_exchange_whatever_its_depths_and_sequences(mask_mode, want, cp):
    overrides = dict(mtp_loss_mask_mode=mask_mode)
    for rank in run_ranks(messages_of_the_objective, cp, cp, overrides):
        assert rank == dict.fromkeys(rank, want)


def test_recomputing_the_heads_exchanges_nothing_again():
    recompute = dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    for rank in run_ranks(messages_of_the_objective, 2, 2, recompute):
        assert rank == dict.fromkeys(rank, ["all_gather_into_tensor"])
