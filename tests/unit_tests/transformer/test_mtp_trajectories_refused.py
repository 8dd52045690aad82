"""Trajectories and masks that cannot become targets, and what the caller is told.

    python -m pytest tests/unit_tests/transformer/test_mtp_trajectories_refused.py
"""

import pytest
import torch

from tests.support import prepare
from tests.support.rows import packed_seq_params

prepare()

from megatron.core.transformer.mtp_objective import pack_trajectories, prediction_aligned_targets

ROW = torch.tensor([[10, 11, 12]])


@pytest.mark.parametrize(
    "tokens, mask, error, text",
    [
        (ROW.float(), ROW, TypeError, "tokens must hold token ids in an .*, got torch.float32"),
        (ROW.bool(), ROW, TypeError, "tokens must hold token ids in an .*, got torch.bool"),
        ([10, 11], ROW, TypeError, "tokens must be an integer tensor, got list"),
        (ROW, [1, 1, 1], TypeError, "token_mask must be a tensor, got list"),
        (ROW, ROW.to(torch.complex64), TypeError, "token_mask must be bool, integer or floating"),
        (ROW, ROW[0], ValueError, r"token_mask must have the shape .* \(1, 3\), got \(3,\)"),
    ],
)
def test_tokens_and_masks_of_the_wrong_type_or_shape_are_refused(tokens, mask, error, text):
    with pytest.raises(error, match=text):
        prediction_aligned_targets(tokens, mask)


@pytest.mark.parametrize(
    "tokens, masks, options, error, text",
    [
        ([], [], {}, ValueError, "at least one trajectory .* got 0 trajectories and 0 masks"),
        ([ROW[0]], [], {}, ValueError, "one mask for each, got 1 trajectories and 0 masks"),
        ([ROW[0].float()], [ROW[0]], {}, TypeError, r"tokens\[0\] must hold token ids"),
        (ROW, ROW, {}, TypeError, r"tokens must be a list .* got a tensor \(1, 3\): pass list"),
        ([ROW[0]], ROW, {}, TypeError, "token_masks must be a list with one tensor"),
        ([ROW], [ROW], {}, ValueError, r"tokens\[0\] must be one trajectory.*\(1, 3\)"),
        ([ROW[0]] * 2, [ROW[0], ROW[0, :2]], {}, ValueError, r"token_masks\[1\] must have the"),
        ([ROW[0]], [ROW[0]], dict(cp_rank=1), ValueError, r"cp_rank must be in \[0, 1\), got 1"),
        ([ROW[0]], [ROW[0]], dict(pad_to_multiple=0), ValueError, "must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_packed_is_refused(tokens, masks, options, error, text):
    with pytest.raises(error, match=text):
        pack_trajectories(tokens, masks, **options)


def test_one_ranks_part_without_its_group_is_refused():
    # Rank 0 of 2 holds 1 2 7 8 of 1 ... 8: without the group, 7 would follow 2.
    part, mask = torch.tensor([[1, 2, 7, 8]]), torch.ones(1, 4)
    text = "end at token 8, but 1 context-parallel .* 4 tokens each hold fewer: pass cp_group"
    with pytest.raises(ValueError, match=text):
        prediction_aligned_targets(part, mask, packed_seq_params([0, 5], [0, 8]))


def test_several_packed_rows_are_refused():
    rows = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must be one row \[1, t\], got \(2, 4\)"):
        prediction_aligned_targets(rows, rows, packed_seq_params([0, 4]))
