"""What each MTP depth is scored against.

    python -m pytest tests/unit_tests/transformer/test_mtp_targets.py
"""

import pytest
import torch

from tests.support import (
    bshd_batch,
    cp_shard,
    device,
    load_packed_targets,
    parallel_world,
    prepare,
    run_ranks,
    thd_batch,
)
from tests.support.rows import packed_seq_params, supervised_counts

prepare()

from megatron.core.transformer.mtp_objective.targets import depth_targets
from megatron.core.transformer.transformer_config import TransformerConfig

PACKED_TARGETS = load_packed_targets()
LABELS = [11, 12, 13, 14, 15, 16, 17, 18]
C15_MASK = [1, 1, 0, 0, 1, 1, 1, 1]


def row_of(values, dtype=torch.int64):
    """[1, t]"""
    return torch.tensor([values], dtype=dtype, device=device())


def lists(tensors):
    return [tensor[0].tolist() for tensor in tensors]


def counts(targets):
    """N_0, N_1, ..., N_D"""
    return [targets.num_tokens.item(), *(n.item() for n in targets.num_targets_D)]


@pytest.mark.parametrize("case", PACKED_TARGETS, ids=lambda case: case.name)
def test_the_packed_cases_have_the_right_targets_and_counts_at_every_depth(case):
    targets = depth_targets(
        row_of(case.inputs.labels),
        row_of(case.inputs.loss_mask),
        row_of(case.inputs.input_ids),
        len(case.depths),
        packed_seq_params=packed_seq_params(case.cu_seqlens, case.cu_seqlens_padded),
    )
    assert lists(targets.labels_DBS) == [depth.labels for depth in case.depths]
    assert lists(targets.masks_DBS) == [depth.loss_mask for depth in case.depths]
    assert counts(targets) == [sum(case.inputs.loss_mask), *supervised_counts(case.name)]
    assert targets.cp_size == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_label_of_minus_100_counts_as_masked(dtype):
    labels = row_of([11, 12, -100, -100, 15, 16, 17, 18])
    unmasked = depth_targets(labels, None, None, 2)
    everywhere = depth_targets(labels, row_of([1] * 8, dtype), None, 2)
    explicit = depth_targets(row_of(LABELS), row_of(C15_MASK, dtype), None, 2)
    for targets in (unmasked, everywhere):
        assert lists(targets.labels_DBS) == lists(explicit.labels_DBS)
        assert counts(targets) == counts(explicit) == [6, 5, 4]
        for got, want in zip(targets.masks_DBS, explicit.masks_DBS):
            assert torch.equal(got.to(dtype), want)


def test_target_mode_asks_for_the_target_alone():
    targets = depth_targets(row_of(LABELS), row_of(C15_MASK), None, 2, mask_mode="target")
    assert lists(targets.masks_DBS) == [[1, 0, 0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 0, 0]]
    assert lists(targets.labels_DBS) == [
        [12, 0, 0, 15, 16, 17, 18, 0],
        [0, 0, 15, 16, 17, 18, 0, 0],
    ]
    assert counts(targets) == [6, 5, 4]


def test_path_mode_asks_for_every_target_up_to_the_depth():
    targets = depth_targets(row_of(LABELS), row_of(C15_MASK), None, 2, mask_mode="path")
    assert lists(targets.masks_DBS) == [[1, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 0]]
    assert lists(targets.labels_DBS) == [
        [12, 0, 0, 0, 16, 17, 18, 0],
        [0, 0, 0, 0, 17, 18, 0, 0],
    ]
    assert counts(targets) == [6, 4, 2]


def test_path_mode_keeps_the_weight_of_the_target():
    weights = row_of([0.5, 0.25, 2.0, 0.0, 1.0], torch.float64)
    targets = depth_targets(row_of(LABELS[:5]), weights, None, 2, mask_mode="path")
    assert lists(targets.masks_DBS) == [[0.25, 2.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0, 0.0]]
    assert counts(targets) == [3.75, 2.25, 2.0]


def test_an_unknown_mask_mode_is_refused():
    with pytest.raises(ValueError, match="must be one of target, path, got 'Path'"):
        depth_targets(row_of(LABELS), None, None, 2, mask_mode="Path")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_of_16_bits_are_counted_exactly(dtype):
    # 303 rounds to 304 in bfloat16; 70000 is beyond the largest float16.
    for length in (304, 70001):
        targets = depth_targets(row_of([1] * length), row_of([1] * length, dtype), None, 1)
        assert counts(targets) == [length, length - 1]


def test_padding_between_packed_sequences_is_no_token_without_a_mask():
    params = packed_seq_params([0, 5, 8], [0, 8, 12])
    assert counts(depth_targets(row_of([1] * 12), None, None, 1, packed_seq_params=params)) == [8, 6]


def test_path_mode_stops_at_a_sequence_boundary():
    params = packed_seq_params([0, 3, 5], [0, 4, 8])
    labels = row_of([11, 12, -100, -100, 21, -100, -100, -100])
    targets = depth_targets(labels, None, None, 2, "path", packed_seq_params=params)
    assert lists(targets.masks_DBS) == [[1, 0, 0, 0, 0, 0, 0, 0], [0] * 8]


def test_without_labels_the_next_input_tokens_are_the_labels_and_the_mask_moves_along():
    # As upstream: roll ids and mask once to get labels and their mask, then once per depth.
    ids, mask = row_of([10, 11, 12, 13, 14]), row_of([1, 1, 0, 1, 1])
    targets = depth_targets(None, mask, ids, 2)
    assert lists(targets.masks_DBS) == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert lists(targets.labels_DBS) == [[0, 13, 14, 0, 0], [13, 14, 0, 0, 0]]
    assert counts(targets) == [3, 2, 2]  # N_0 counts the labels: one token fewer than the ids
    unmasked = depth_targets(None, None, ids, 2)
    assert lists(unmasked.labels_DBS) == [[12, 13, 14, 0, 0], [13, 14, 0, 0, 0]]
    assert counts(unmasked) == [4, 3, 2]


def test_without_labels_no_target_crosses_into_the_next_packed_sequence():
    params = packed_seq_params([0, 3, 5], [0, 4, 8])
    ids = row_of([10, 11, 12, 0, 20, 21, 0, 0])
    targets = depth_targets(None, None, ids, 1, packed_seq_params=params)
    assert lists(targets.labels_DBS) == [[12, 0, 0, 0, 0, 0, 0, 0]]
    assert counts(targets) == [3, 1]


def test_without_labels_and_input_ids_there_are_no_targets():
    assert depth_targets(None, None, None, 2) is None


@pytest.mark.parametrize("mode", ["target", "path"])
def test_an_empty_mask_leaves_no_target_at_any_depth(mode):
    targets = depth_targets(row_of(LABELS), row_of([0] * 8), None, 3, mask_mode=mode)
    assert counts(targets) == [0, 0, 0, 0]
    assert lists(targets.labels_DBS) == [[0] * 8] * 3


def test_more_depths_than_tokens_leave_the_deepest_without_targets():
    targets = depth_targets(row_of([11, 12]), None, None, 3)
    assert counts(targets) == [2, 1, 0, 0]


def test_the_callers_labels_and_mask_stay_as_they_are():
    labels, mask = row_of([11, -100, 13]), row_of([1, 1, 1])
    depth_targets(labels, mask, None, 2, mask_mode="path")
    assert lists([labels, mask]) == [[11, -100, 13], [1, 1, 1]]


IDS, MASK = torch.tensor([[10, 11, 12]]), torch.tensor([[1, 1, 1]])


@pytest.mark.parametrize(
    "labels, mask, error, text",
    [
        (IDS.float(), MASK, TypeError, r"labels must hold token ids.*got torch.float32; convert w"),
        (IDS.bool(), MASK, TypeError, r"labels must hold token ids.*got torch.bool"),
        ([[1, 2, 3]], MASK, TypeError, r"labels must be an integer tensor, got list"),
        (IDS[:, :2], MASK, ValueError, r"labels .* shape of input_ids, \(1, 3\), got \(1, 2\)"),
        (IDS, [[1, 1, 1]], TypeError, r"loss_mask must be a tensor, got list"),
        (IDS, MASK.to(torch.complex64), TypeError, r"loss_mask must be bool, integer or floating"),
        (IDS, MASK[0], ValueError, r"loss_mask .* shape of labels, \(1, 3\), got \(3,\)"),
        (None, MASK[:, 1:], ValueError, r"loss_mask .* shape of input_ids, \(1, 3\), got \(1, 2\)"),
    ],
)
def test_labels_and_masks_of_the_wrong_dtype_or_shape_are_refused(labels, mask, error, text):
    with pytest.raises(error, match=text):
        depth_targets(labels, mask, IDS, 2)


def all_targets(cp=1, group=None):
    """Targets of a rank's part of two batches, in both mask modes."""
    rank = 0 if group is None else group.rank()
    for batch in (
        bshd_batch(batch=2, length=16, mask="prompt"),
        thd_batch(lengths=(11, 16, 3), padded_lengths=(16, 16, 8), mask="full"),
    ):
        part = cp_shard(batch, cp, rank)
        for mode in ("target", "path"):
            yield depth_targets(
                part.labels, part.loss_mask, part.input_ids, 3, mode, part.packed_seq_params, group
            )


def counted_on_rank(cp):
    with parallel_world(cp=cp) as groups:
        return [
            (counts(targets), [int(mask.sum()) for mask in targets.masks_DBS], targets.cp_size)
            for targets in all_targets(cp, groups.cp)
        ]


@pytest.mark.parametrize("cp", [2, 4])
def test_every_context_parallel_rank_counts_what_one_rank_counts(cp):
    ranks = run_ranks(counted_on_rank, cp, cp)
    for i, targets in enumerate(all_targets()):
        assert [rank[i][0] for rank in ranks] == [counts(targets)] * cp
        assert {rank[i][2] for rank in ranks} == {cp}
        local = [rank[i][1] for rank in ranks]
        assert [sum(depth) for depth in zip(*local)] == counts(targets)[1:]
        assert any(depths != counts(targets)[1:] for depths in local)


@pytest.mark.parametrize(
    "field, text",
    [
        ("mtp_loss_mask_mode", "mtp_loss_mask_mode must be one of target, path, got 'whole'"),
        ("mtp_loss_normalization", "must be one of microbatch, global, got 'whole'"),
    ],
)
def test_a_config_refuses_an_unknown_mask_mode_and_normalization(field, text):
    with pytest.raises(ValueError, match=text):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **{field: "whole"})
