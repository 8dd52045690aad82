"""A padding mask that sequence parallelism has spread reaches the experts of every head shifted right.

    python -m pytest tests/unit_tests/transformer/test_mtp_padding_mask.py
"""

import functools

import pytest
import torch

from tests.support import prepare, run_ranks, worst_difference
from tests.support.claims import supports
from tests.support.parallel_faults import masked_gradients

prepare()

from megatron.core.transformer.mtp_objective.padding import (
    gather_padding_mask,
    scatter_padding_mask,
)

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def _of_all_kinds():
    return {kind: masked_gradients(2, balancing=kind) for kind in BALANCING}


@functools.cache
def _split():
    return run_ranks(_of_all_kinds, 2)[0]


@supports("Padding mask of experts", agrees=1e-12, ranks="TP=2 on 2")
@pytest.mark.parametrize("balancing", BALANCING)
def test_gradients_with_a_padding_mask_are_those_of_one_rank(balancing):
    want = masked_gradients(1, balancing=balancing)
    assert worst_difference(_split()[balancing], want)[0] <= 1e-12


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
