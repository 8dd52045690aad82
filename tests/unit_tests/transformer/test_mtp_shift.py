"""The shift of the MTP objective, against plain lists, in one process.

Context-parallel ranks are in ``test_mtp_shift_ranks.py``, layouts in ``test_mtp_shift_layout.py``.

    python -m pytest tests/unit_tests/transformer/test_mtp_shift.py
"""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.support import device, load_packed_targets, prepare, zigzag_indices
from tests.support.release import release
from tests.support.rows import PackedRow, draw_row, packed_seq_params, supervised_counts

prepare()

from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.shift import shift_fields
from megatron.core.transformer.multi_token_prediction import roll_tensor

PACKED_TARGETS = load_packed_targets()


def tensor(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device())


def row_of(values, dtype=torch.int64):
    """[1, t]"""
    return tensor([values], dtype)


@pytest.mark.parametrize("case", PACKED_TARGETS, ids=lambda case: case.name)
def test_every_depth_of_the_packed_cases_has_the_right_ids_labels_and_masks(case):
    params = packed_seq_params(case.cu_seqlens, case.cu_seqlens_padded)
    fields = [row_of(case.inputs.input_ids), row_of(case.inputs.labels)]
    fields.append(row_of(case.inputs.loss_mask))
    layout = SequenceLayout.of(fields[0], params)
    shifted = shift_fields(fields, range(1, len(case.depths) + 1), layout)
    for want, (ids, labels, mask) in zip(case.depths, shifted, strict=True):
        assert ids[0].tolist() == want.input_ids
        assert mask[0].tolist() == want.loss_mask
        assert (labels * mask)[0].tolist() == want.labels
    counts = [int(mask.sum()) for _, _, mask in shifted]
    assert counts == supervised_counts(case.name)


def test_a_padded_row_of_5_and_3_has_6_next_tokens_and_none_crosses_into_the_next_sequence():
    params = packed_seq_params([0, 5, 8], [0, 8, 12])
    ids = row_of([1, 2, 3, 4, 5, 0, 0, 0, 11, 12, 13, 0])
    real = ids.clamp(max=1)
    (shifted_ids, shifted_real), = shift_fields([ids, real], [1], SequenceLayout.of(ids, params))
    assert shifted_ids[0].tolist() == [2, 3, 4, 5, 0, 0, 0, 0, 12, 13, 0, 0]
    assert shifted_real.sum() == 6


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
def test_any_packed_row_shifts_as_plain_lists_do(data):
    row = draw_row(lambda low, high: data.draw(st.integers(low, high)), multiple=1)
    shifts = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    values = row_of(row.values)
    layout = SequenceLayout.of(values, row.packed_seq_params())
    got = [fields[0][0].tolist() for fields in shift_fields([values], shifts, layout)]
    assert got == [row.shifted(k) for k in shifts]


@hypothesis.given(
    rows=st.lists(st.lists(st.integers(1, 99), min_size=6, max_size=6), min_size=1, max_size=3),
    shifts=st.lists(st.integers(0, 8), min_size=1, max_size=3),
)
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
def test_any_padded_batch_shifts_row_by_row_as_plain_lists_do(rows, shifts):
    values = tensor(rows)
    shifted = shift_fields([values], shifts, SequenceLayout.of(values))
    for k, (got,) in zip(shifts, shifted, strict=True):
        assert got.tolist() == [row[k:] + [0] * min(k, 6) for row in rows]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.float64])
def test_a_shift_keeps_the_dtype_and_every_leading_dimension(dtype):
    params = packed_seq_params([0, 2, 4], [0, 3, 6])
    axes = tensor([[[1, 1, 0, 1, 1, 0]]] * 3).to(dtype)
    ((shifted,),) = shift_fields([axes], [1], SequenceLayout.of(axes, params))
    assert shifted.dtype == dtype and shifted.shape == (3, 1, 6)
    assert shifted.to(torch.int64).tolist() == [[[1, 0, 0, 1, 0, 0]]] * 3


def test_a_shift_of_zero_returns_the_field_itself():
    ids = row_of([10, 11, 12])
    assert shift_fields([ids], [0], SequenceLayout.of(ids))[0][0] is ids


def test_gradients_flow_back_through_a_shift_without_context_parallelism():
    values = row_of([1.0, 2.0, 3.0, 4.0], torch.float64).requires_grad_()
    layout = SequenceLayout.of(values, packed_seq_params([0, 2, 4]))
    shift_fields([values], [1], layout)[0][0].sum().backward()
    assert values.grad.tolist() == [[0.0, 1.0, 0.0, 1.0]]


@pytest.mark.parametrize("cu_seqlens", [[0, 8], [0, 3, 4, 8], [0, 1, 2, 8]])
def test_unpadded_sequences_roll_as_upstream_rolls_them_one_by_one(cu_seqlens):
    ids = row_of([10, 11, 12, 20, 30, 31, 32, 33])
    want = ids.clone()
    for start, end in zip(cu_seqlens, cu_seqlens[1:]):
        want[..., start:end] = torch.roll(ids[..., start:end], shifts=-1, dims=-1)
        want[..., end - 1] = 0
    rolled, total = roll_tensor(ids, packed_seq_params=packed_seq_params(cu_seqlens))
    assert rolled.tolist() == want.tolist() and total == want.sum()
    assert rolled.dtype == ids.dtype and ids[0, 0] == 10


def test_position_ids_and_padding_mask_roll_inside_padded_boundaries():
    params = packed_seq_params([0, 3, 5], [0, 4, 8])
    positions, _ = roll_tensor(row_of([0, 1, 2, 3, 0, 1, 2, 3]), packed_seq_params=params)
    assert positions.tolist() == [[1, 2, 0, 0, 1, 0, 0, 0]]
    is_padding = row_of([0, 0, 0, 1, 0, 0, 1, 1], torch.bool)
    rolled, total = roll_tensor(is_padding, packed_seq_params=params)
    assert rolled.dtype == torch.bool and not rolled.any() and total == 0
    if release() >= (0, 19):
        assert roll_tensor(None, packed_seq_params=params) == (None, None)


@pytest.mark.parametrize("arguments, message", [
    (dict(dims=0), "only supports the last dimension"),
    (dict(shifts=-2), "only supports a single-token left shift"),
])
def test_the_packed_roll_refuses_what_upstream_refuses(arguments, message):
    with pytest.raises(AssertionError, match=message):
        roll_tensor(row_of([10, 11]), packed_seq_params=packed_seq_params([0, 2]), **arguments)


def test_shifts_may_come_from_an_iterator():
    ids = row_of([10, 11, 12])
    shifted = shift_fields([ids], iter((1, 2)), SequenceLayout.of(ids))
    assert [fields[0][0].tolist() for fields in shifted] == [[11, 12, 0], [12, 0, 0]]


def test_a_negative_shift_is_refused():
    ids = row_of([10, 11, 12])
    with pytest.raises(ValueError, match=r"must be ≥ 0, got \[1, -1\]"):
        shift_fields([ids], [1, -1], SequenceLayout.of(ids))


def test_a_field_of_another_length_is_refused():
    ids = row_of([10, 11, 12])
    with pytest.raises(ValueError, match=r"layout's 3 local positions.*got shape \(1, 4\)"):
        shift_fields([ids, row_of([1, 1, 1, 1])], [1], SequenceLayout.of(ids))


def test_the_plain_list_reference_itself_is_right_on_a_row_that_explains_itself():
    row = PackedRow(lengths=[3, 2], places=[4, 2], tail=[9])
    assert row.values == [10, 11, 12, 7, 20, 21, 9]
    assert row.shifted(1) == [11, 12, 0, 0, 21, 0, 0]
    assert row.shifted(2) == [12, 0, 0, 0, 0, 0, 0]
