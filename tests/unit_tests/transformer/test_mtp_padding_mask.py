"""A padding mask that sequence parallelism has spread reaches the experts of every head shifted right.

    python -m pytest tests/unit_tests/transformer/test_mtp_padding_mask.py
"""

import functools

import pytest
import torch

from tests.support import ModelSpec, bshd_batch, build_model, device, fp64_cross_entropy
from tests.support import parallel_world, prepare, run_ranks, worst_difference
from tests.support.claims import supports
from tests.support.objective import step_gradients
from tests.support.whole_gradients import whole_gradients

prepare()

from megatron.core.transformer.mtp_objective.padding import (
    gather_padding_mask,
    scatter_padding_mask,
)

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def gradients(balancing, tp):
    """Where the mask counts: in the load-balancing loss of the experts."""
    spec = ModelSpec(
        num_experts=4,
        hidden_size=16,
        num_layers=1,
        overrides=dict(
            sequence_parallel=tp > 1,
            moe_router_load_balancing_type=balancing,
            moe_aux_loss_coeff=0.1,
            moe_token_dispatcher_type="alltoall",
        ),
    )
    lengths = torch.tensor([[3], [5]], device=device())
    padding_mask = torch.arange(8, device=device())[None] >= lengths
    with fp64_cross_entropy(), parallel_world(tp=tp) as groups:
        model = build_model(spec)
        step_gradients(model, bshd_batch(2, 8), padding_mask=padding_mask)
        return whole_gradients([model], groups)


def _of_all_kinds():
    return {balancing: gradients(balancing, 2) for balancing in BALANCING}


@functools.cache
def _split():
    return run_ranks(_of_all_kinds, 2)[0]


@supports("Padding mask of experts", agrees=1e-12, ranks="TP=2 on 2")
@pytest.mark.parametrize("balancing", BALANCING)
def test_gradients_with_a_padding_mask_are_those_of_one_rank(balancing):
    assert worst_difference(_split()[balancing], gradients(balancing, 1))[0] <= 1e-12


class _Group:
    def size(self):
        return 2

    def rank(self):
        return 1


def test_a_whole_mask_is_left_alone():
    mask = torch.tensor([[False, True, True, True]])
    assert gather_padding_mask(mask, 4, _Group()) is mask
    assert scatter_padding_mask(mask, 4, _Group()) is mask


def test_a_rank_takes_its_own_part_back():
    mask = torch.tensor([[False, True, False, True]])
    assert scatter_padding_mask(mask, 2, _Group()).tolist() == [[False, True]]


def test_a_mask_of_another_length_is_refused():
    mask = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="3 positions on each of 2 .*ranks, but input_ids has 8"):
        gather_padding_mask(mask, 8, _Group())
    with pytest.raises(ValueError, match="2 positions on each of 2 .*, but padding_mask has 3"):
        scatter_padding_mask(mask, 2, _Group())
