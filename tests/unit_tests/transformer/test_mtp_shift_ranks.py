"""The shift of the MTP objective on context-parallel ranks, against the shard of the whole.

One launch per context-parallel size runs everything; each test reads its part of the report.

    python -m pytest tests/unit_tests/transformer/test_mtp_shift_ranks.py
"""

import contextlib
import random
from unittest import mock

import pytest
import torch

from tests.support import device, load_packed_targets, parallel_world, prepare, run_ranks, shard
from tests.support.rows import PackedRow, draw_row, packed_seq_params

prepare()

from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.shift import shift_fields
from megatron.core.transformer.multi_token_prediction import roll_tensor

CP_SIZES = [2, 4]
EXAMPLES = 150
TRANSPORTS = [
    "all_gather_into_tensor",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "irecv",
    "isend",
]


def row_of(values, dtype=torch.int64):
    """[1, t]"""
    return torch.tensor([values], dtype=dtype, device=device())


@pytest.fixture(scope="module", params=CP_SIZES, ids=lambda cp: f"cp{cp}")
def report(request):
    """What the ranks of one context-parallel size found, merged over ranks."""
    parts = run_ranks(rank_report, request.param, request.param, timeout=120.0)
    return {check: [part[check] for part in parts] for check in parts[0]}


def rank_report(cp):
    with parallel_world(cp=cp) as groups:
        checks = [
            random_rows,
            random_batches,
            packed_cases,
            mixed_dtypes,
            messages,
            padded_roll,
            refusals,
        ]
        return {check.__name__: check(cp, groups.cp) for check in checks}


def random_rows(cp, group):
    """Seeded random packed rows, several shifts at once: those that differ from the lists."""
    differing = []
    for seed in range(EXAMPLES):
        draw = random.Random(seed)
        row = draw_row(draw.randint, multiple=2 * cp)
        shifts = [draw.randint(0, 12) for _ in range(draw.randint(1, 4))]
        local = row_of(row.part(row.values, cp, group.rank()))
        layout = SequenceLayout.of(local, row.packed_seq_params(), group)
        got = [fields[0][0].tolist() for fields in shift_fields([local], shifts, layout)]
        want = [row.part(row.shifted(k), cp, group.rank()) for k in shifts]
        if got != want:
            differing.append(f"seed {seed}: {row}, shifts {shifts}: got {got}, want {want}")
    return differing


def random_batches(cp, group):
    """Rows of BSHD batches: shifted as lists are, and by one as upstream's own roll does."""
    differing = []
    for seed in range(20):
        draw = random.Random(seed)
        length = 2 * cp * draw.randint(1, 4)
        rows = [[100 * b + t + 1 for t in range(length)] for b in range(draw.randint(1, 3))]
        shifts = [1, *(draw.randint(0, length + 1) for _ in range(2))]
        local = shard(row_of(rows)[0], cp, group.rank())
        shifted = shift_fields([local], shifts, SequenceLayout.of(local, cp_group=group))
        for k, (got,) in zip(shifts, shifted):
            want = row_of([row[k:] + [0] * min(k, length) for row in rows])[0]
            if not torch.equal(got, shard(want, cp, group.rank())):
                differing.append(f"rows {rows}, shift {k}: got {got.tolist()}")
        if not torch.equal(shifted[0][0], roll_tensor(local, cp_group=group)[0]):
            differing.append(f"rows {rows}: not what upstream's roll gives")
    return differing


def packed_cases(cp, group):
    """Cases of packed_targets.json at this size: how many were checked, and what differs."""
    cases = [case for case in load_packed_targets() if cp in case.ranks]
    differing = []
    for case in cases:
        part = case.ranks[cp][group.rank()]
        inputs = part.inputs
        fields = [row_of(inputs.input_ids), row_of(inputs.labels), row_of(inputs.loss_mask)]
        params = packed_seq_params(case.cu_seqlens, case.cu_seqlens_padded)
        layout = SequenceLayout.of(fields[0], params, group)
        shifted = shift_fields(fields, range(1, len(part.depths) + 1), layout)
        for depth, (want, (ids, labels, mask)) in enumerate(zip(part.depths, shifted), start=1):
            got = [f[0].tolist() for f in (ids, labels * mask, mask)]
            if got != [want.input_ids, want.labels, want.loss_mask]:
                differing.append(f"{case.name}, depth {depth}: got {got}")
    return len(cases), differing


def mixed_dtypes(cp, group):
    """Fields of every dtype in one exchange, where no two sizes of a token agree by accident."""
    row = PackedRow(lengths=[4 * cp - 1, 1, 2 * cp], places=[4 * cp, 2 * cp, 2 * cp])
    differing = []

    def local(values):
        return row_of(row.part(values, cp, group.rank()))

    def typed(values, dtype):
        return local(values) % 2 == 0 if dtype == torch.bool else local(values).to(dtype)

    dtypes = [torch.bool, torch.int64, torch.float32, torch.float64, torch.uint8, torch.int32]
    fields = [typed(row.values, dtype) for dtype in dtypes]
    fields.append(torch.stack([local(row.values) + 1000 * axis for axis in range(3)]))
    layout = SequenceLayout.of(fields[0], row.packed_seq_params(), group)
    for k, shifted in zip([1, 3], shift_fields(fields, [1, 3], layout)):
        inside = local(row.shifted(k)) != 0
        wanted = [typed(row.shifted(k), dtype) & inside for dtype in dtypes[:1]]
        wanted += [typed(row.shifted(k), dtype) for dtype in dtypes[1:]]
        axes = [torch.where(inside, local(row.shifted(k)) + 1000 * axis, 0) for axis in range(3)]
        wanted.append(torch.stack(axes))
        for got, want in zip(shifted, wanted, strict=True):
            if got.dtype != want.dtype or not torch.equal(got, want):
                differing.append(f"shift {k}, {got.dtype}: got {got}, want {want}")
    return differing


def messages(cp, group):
    """Calls of every transport for one and for many sequences, fields and shifts."""
    counts = []
    for sequences, fields, shifts in [(1, 1, 1), (20, 1, 1), (20, 5, 6)]:
        row = PackedRow(lengths=[2 * cp] * sequences, places=[2 * cp] * sequences)
        local = row_of(row.part(row.values, cp, group.rank()))
        layout = SequenceLayout.of(local, row.packed_seq_params(), group)
        called = []
        with noting_transports(called):
            shift_fields([local] * fields, range(1, shifts + 1), layout)
        counts.append(called)
    return counts


def noting_transports(called):
    """A context that appends the name of every transport of torch.distributed that is called."""
    stack = contextlib.ExitStack()
    for name in TRANSPORTS:
        real = getattr(torch.distributed, name)

        def noting(*args, name=name, real=real, **kwargs):
            called.append(name)
            return real(*args, **kwargs)

        stack.enter_context(mock.patch.object(torch.distributed, name, noting))
    return stack


def padded_roll(cp, group):
    """roll_tensor of ids of two padded sequences: 1 to 5 in places of 4 cp, 11 to 13 in 2 cp."""
    row = [1, 2, 3, 4, 5] + [0] * (4 * cp - 5) + [11, 12, 13] + [0] * (2 * cp - 3)
    params = packed_seq_params([0, 5, 8], [0, 4 * cp, 6 * cp])
    local = shard(row_of(row), cp, group.rank(), [0, 4 * cp, 6 * cp])
    rolled, total = roll_tensor(local, cp_group=group, packed_seq_params=params)
    assert total == rolled.sum()
    return local[0].tolist(), rolled[0].tolist()


def refusals(cp, group):
    """Error texts of lengths that this size cannot split, and of an odd BSHD row."""
    texts = []
    for tensor, params in [(row_of([0] * 3), packed_seq_params([0, 7, 12])), (row_of([0]), None)]:
        try:
            SequenceLayout.of(tensor, params, group)
            texts.append("accepted")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_any_packed_row_shifts_as_plain_lists_do_on_every_rank(report):
    assert report["random_rows"] == [[]] * len(report["random_rows"])


def test_any_padded_batch_shifts_as_plain_lists_do_on_every_rank(report):
    assert report["random_batches"] == [[]] * len(report["random_batches"])


def test_every_depth_of_the_packed_cases_is_right_on_every_rank(report):
    expected = {2: 3}.get(len(report["packed_cases"]), 0)  # the file holds CP 1 and 2
    assert report["packed_cases"] == [(expected, [])] * len(report["packed_cases"])


def test_fields_of_every_dtype_travel_together_unchanged(report):
    assert report["mixed_dtypes"] == [[]] * len(report["mixed_dtypes"])


def test_one_all_gather_serves_any_number_of_sequences_fields_and_shifts(report):
    for calls in report["messages"]:
        assert calls == [["all_gather_into_tensor"]] * 3


def test_the_packed_roll_keeps_tokens_in_their_padded_sequence_on_every_rank(report):
    # At CP 2 rank 1's ids 3,4,5,0,12,13 become 4,5,0,0,13,0; upstream gives 4,2,0,0,12,13.
    if len(report["padded_roll"]) == 2:
        assert report["padded_roll"][1] == ([3, 4, 5, 0, 12, 13], [4, 5, 0, 0, 13, 0])
    after = {1: 2, 2: 3, 3: 4, 4: 5, 11: 12, 12: 13}
    for ids, rolled in report["padded_roll"]:
        assert rolled == [after.get(token, 0) for token in ids]


def test_what_context_parallelism_cannot_split_is_refused_with_the_lengths(report):
    cp = len(report["refusals"])
    for packed, odd in report["refusals"]:
        assert f"multiples of 2·cp = {2 * cp}, got [7, 5]" in packed
        assert "cu_seqlens_q_padded" in packed
        assert "got 1" in odd and f"2·cp = {2 * cp}" in odd
