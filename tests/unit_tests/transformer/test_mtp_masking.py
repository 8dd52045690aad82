"""Which rows reach the head.

    python -m pytest tests/unit_tests/transformer/test_mtp_masking.py
"""

import torch

from tests.support import device, parallel_world, prepare, run_ranks

prepare()

from megatron.core.transformer.mtp_objective.masking import drop_unsupervised_rows


def test_a_kept_row_passes_to_the_bit_and_a_dropped_one_becomes_zero_both_ways():
    hidden_SBH = torch.randn(4, 2, 3, dtype=torch.float64, device=device())
    hidden_SBH[2, 0] = float("nan")
    hidden_SBH.requires_grad_()
    mask_BS = torch.tensor([[1.0, 0.5, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]], device=device())
    kept_SBH = drop_unsupervised_rows(hidden_SBH, mask_BS)
    is_kept_SB = (mask_BS != 0).T
    assert torch.equal(kept_SBH[is_kept_SB], hidden_SBH[is_kept_SB])
    assert torch.equal(kept_SBH[~is_kept_SB], torch.zeros_like(kept_SBH[~is_kept_SB]))
    torch.autograd.backward(kept_SBH, torch.full_like(kept_SBH, float("inf")))
    assert torch.equal(hidden_SBH.grad.isinf(), is_kept_SB[..., None].expand_as(hidden_SBH))
    assert (hidden_SBH.grad[~is_kept_SB] == 0).all()


def sharded_rows():
    """Rows kept on this rank of a tensor-parallel pair, and what a wrong mask is told."""
    with parallel_world(tp=2) as groups:
        hidden_SBH = torch.ones(3, 1, 2, device=device()) * (10 + 10 * groups.tp.rank())
        mask_BS = torch.tensor([[1, 0, 1, 0, 1, 1]], device=device())
        kept = drop_unsupervised_rows(hidden_SBH, mask_BS, groups.tp)
        try:
            drop_unsupervised_rows(hidden_SBH, mask_BS[:, :5], groups.tp)
            text = "accepted"
        except ValueError as error:
            text = str(error)
        return kept[:, 0, 0].tolist(), text


def test_sequence_parallel_ranks_drop_their_own_rows_and_refuse_another_number_of_them():
    (first, text), (second, _) = run_ranks(sharded_rows, 2)
    assert (first, second) == ([10, 0, 10], [0, 20, 20])
    assert "hold 3 rows on each of 2 tensor-parallel ranks, the loss mask 5: pass labels" in text
