"""Where a rank's tokens sit in their sequences, and which boundaries are refused.

    python -m pytest tests/unit_tests/transformer/test_mtp_shift_layout.py
"""

import pytest
import torch

from tests.support import device, prepare, zigzag_indices
from tests.support.rows import packed_seq_params

prepare()

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.shift import shift_fields


def tensor(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device())


def row_of(values, dtype=torch.int64):
    """[1, t]"""
    return tensor([values], dtype)


class GroupOf:
    """Size and rank of a context-parallel group, for what needs no communication."""

    def __init__(self, size: int, rank: int = 0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_layout_places_local_tokens_where_the_zigzag_order_says(cp):
    places = [8, 16, 8]
    starts = [0, 8, 24, 32]
    params = packed_seq_params([0, 5, 19, 20], starts)
    for rank in range(cp):
        owned = zigzag_indices(32, cp, rank, starts)
        layout = SequenceLayout.of(row_of(owned), params, GroupOf(cp, rank))
        sequences = layout.sequence_T.tolist()
        assert [starts[n] + p for n, p in zip(sequences, layout.position_T.tolist())] == owned
        assert layout.length_N.tolist() == [5, 14, 1]
        assert layout.chunk_N.tolist() == [p if cp == 1 else p // (2 * cp) for p in places]
        assert layout.cp_size == cp


def test_a_context_parallel_group_in_the_packed_parameters_replaces_the_argument():
    params = packed_seq_params([0, 8])
    params.cp_group = GroupOf(2, rank=1)
    layout = SequenceLayout.of(row_of([2, 3, 4, 5]), params, GroupOf(4))
    assert layout.position_T.tolist() == [2, 3, 4, 5]


def test_a_sequence_that_dynamic_context_parallelism_left_whole_is_whole():
    params = packed_seq_params([0, 5])
    params.local_cp_size = 1
    layout = SequenceLayout.of(row_of([10, 11, 12, 13, 14]), params, GroupOf(4, rank=1))
    assert layout.cp_group is None and layout.position_T.tolist() == [0, 1, 2, 3, 4]


def test_real_lengths_beyond_the_padded_ones_do_not_reach_the_next_sequence():
    params = packed_seq_params([0, 7, 12], [0, 4, 12])
    ids = row_of([10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 26, 27])
    [[shifted]] = shift_fields([ids], [1], SequenceLayout.of(ids, params))
    assert shifted[0].tolist() == [11, 12, 13, 0, 21, 22, 23, 24, 0, 0, 0, 0]


def test_boundaries_beyond_the_row_bring_nothing_in():
    ids = row_of([10, 11, 12])
    [[shifted]] = shift_fields([ids], [1], SequenceLayout.of(ids, packed_seq_params([0, 5])))
    assert shifted[0].tolist() == [11, 12, 0]


def test_no_value_of_a_batch_is_read_on_the_host():
    # A meta tensor has no values: any read of one raises.
    ids = torch.empty(1, 12, dtype=torch.int64, device="meta")
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.empty(3, dtype=torch.int32, device="meta"),
        cu_seqlens_q_padded=torch.empty(3, dtype=torch.int32, device="meta"),
    )
    shifted = shift_fields([ids], [1, 2], SequenceLayout.of(ids, params))
    assert [fields[0].shape for fields in shifted] == [(1, 12), (1, 12)]


@pytest.mark.parametrize(
    "cu_seqlens, came",
    [
        (None, "got None"),
        ([0, 2], "got list"),
        (tensor([[0, 2]]), r"got \(1, 2\)"),
        (tensor([0]), r"got \(1,\)"),
    ],
)
def test_boundaries_that_are_no_cumulative_lengths_are_refused(cu_seqlens, came):
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens)
    expected = r"need packed_seq_params.cu_seqlens_q, the cumulative .* tensor \[n \+ 1\], n ≥ 1; "
    with pytest.raises(ValueError, match=expected + came):
        SequenceLayout.of(row_of([10, 11]), params)


def test_boundaries_that_are_no_integers_are_refused():
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=tensor([0, 2], torch.float32))
    with pytest.raises(ValueError, match="cu_seqlens_q must have an integer dtype, got torch.float32"):
        SequenceLayout.of(row_of([10, 11]), params)


def test_padded_boundaries_of_another_number_of_sequences_are_refused():
    with pytest.raises(ValueError, match=r"shape of cu_seqlens_q, \(3,\), got \(2,\)"):
        SequenceLayout.of(row_of([10, 11, 20]), packed_seq_params([0, 2, 3], [0, 3]))


@pytest.mark.parametrize("padded", [None, [0, 7, 12]], ids=["unpadded", "padded"])
def test_packed_lengths_that_context_parallelism_cannot_split_are_refused(padded):
    params = packed_seq_params([0, 7, 12], padded)
    expected = (
        r"over 2 ranks needs packed lengths that are multiples of 2·cp = 4, got \[7, 5\]: "
        r"pad each sequence and pass packed_seq_params.cu_seqlens_q_padded"
    )
    with pytest.raises(ValueError, match=expected):
        SequenceLayout.of(row_of([0] * 6), params, GroupOf(2))


def test_an_odd_number_of_local_positions_is_refused_under_context_parallelism():
    with pytest.raises(ValueError, match=r"even number.*got 3: pad each row.*2·cp = 8"):
        SequenceLayout.of(row_of([10, 11, 12]), cp_group=GroupOf(4))
