"""Looking ahead in rows of hidden states, against plain lists of the whole sequence.

    python -m pytest tests/unit_tests/transformer/test_mtp_row_shift.py

One launch per context-parallel size runs every layout; each test reads its part of the report.
"""

import contextlib
import dataclasses
import random
from unittest import mock

import pytest
import torch

from tests.support import device, parallel_world, prepare, relative_error, run_ranks
from tests.support.host_sync import HostSyncs
from tests.support.rows import PackedRow, draw_row, look_ahead, packed_seq_params
from tests.support.sharding import zigzag_indices

prepare()

from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.row_shift import ShiftedRows

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
TRANSPORTS = [GATHER, SCATTER, "all_gather", "all_reduce", "all_to_all_single", "batch_isend_irecv"]
HIDDEN = 3
DRAWS = 25


@dataclasses.dataclass
class Whole:
    """A batch over all context-parallel ranks.

    Attributes:
        params: Boundaries of packed sequences, or None.
        bounds: (start, real tokens) of each sequence.
        starts: As in `zigzag_indices`.
        tail: Tokens behind the last sequence, which every rank has.
        batch: Batch rows.
    """

    params: object
    bounds: list
    starts: list
    tail: int = 0
    batch: int = 1

    @property
    def length(self):
        return self.starts[-1] + self.tail

    def owned(self, cp, rank):
        """Global positions of a rank, [s]."""
        inside = zigzag_indices(self.starts[-1], cp, rank, self.starts)
        return torch.tensor(inside + list(range(self.starts[-1], self.length)), device=device())

    def shifted(self, rows_SBH, k):
        """Row t + k at t, one by one."""
        numbers = look_ahead(range(1, self.length + 1), k, self.bounds)
        nothing = torch.zeros_like(rows_SBH[0])
        return torch.stack([rows_SBH[number - 1] if number else nothing for number in numbers])


def packed(row: PackedRow):
    return Whole(
        row.packed_seq_params(), list(zip(row.starts, row.lengths)), row.starts, len(row.tail)
    )


def batch_of(batch, length):
    return Whole(None, [(0, length)], [0, length], 0, batch)


def wholes(cp):
    """Named layouts that split over ``cp`` ranks, and seeded random packed rows."""
    unit = 2 * cp
    found = {
        "bshd": batch_of(3, 3 * unit),
        "bshd, chunks shorter than the shift": batch_of(2, unit),
        "thd": packed(PackedRow([2 * unit, unit], [2 * unit, unit])),
        "thd, padded": packed(PackedRow([unit + 1, 1, 0], [2 * unit, unit, unit], [9, 9])),
    }
    for seed in range(DRAWS):
        found[f"thd, seed {seed}"] = packed(draw_row(random.Random(seed).randint, unit))
    return found


def draw(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device(), dtype)


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda cp: f"cp{cp}")
def report(request):
    """What the ranks of one context-parallel size found, merged over ranks."""
    parts = run_ranks(rank_report, request.param, request.param, timeout=120.0)
    return {check: [part[check] for part in parts] for check in parts[0]}


def rank_report(cp):
    with parallel_world(cp=cp) as groups:
        checks = [every_layout, messages, waiting, half_precision]
        return {check.__name__: check(cp, groups.cp) for check in checks}


def local_rows(whole, cp, group, requires_grad=True):
    """The whole rows, and this rank's with their layout."""
    whole_SBH = draw((whole.length, whole.batch, HIDDEN), seed=7).requires_grad_(requires_grad)
    owned = whole.owned(cp, group.rank())
    rows_SBH = whole_SBH.detach()[owned].requires_grad_(requires_grad)
    layout = SequenceLayout.of(rows_SBH[..., 0].t(), whole.params, group)
    return whole_SBH, rows_SBH, owned, layout


def every_layout(cp, group):
    """Layouts whose shifted rows differ, and the worst relative error of a gradient."""
    differing, worst = [], 0.0
    for name, whole in wholes(cp).items():
        for reach in (1, 3):
            whole_SBH, rows_SBH, owned, layout = local_rows(whole, cp, group)
            ahead = ShiftedRows.of(rows_SBH, reach, layout)
            want_loss, loss, taken_loss = whole_SBH.sum() * 0, 0, 0
            order = torch.randperm(owned.numel() * whole.batch).to(device())
            for k in range(reach + 1):
                want = whole.shifted(whole_SBH, k)
                weight = draw(want.shape, seed=100 + k)
                got, taken = ahead.shifted(k), ahead.take(k, order)
                flat = want[owned].flatten(0, 1)
                sliced = torch.equal(ahead.take(k, slice(2, -1)), flat[2:-1])
                same = torch.equal(got, want[owned]) and torch.equal(taken, flat[order])
                if not (same and sliced):
                    differing.append(f"{name}, reach {reach}, shift {k}")
                want_loss = want_loss + (want * weight).sum()
                loss = loss + (got * weight[owned]).sum()
                taken_loss = taken_loss + (taken * weight[owned].flatten(0, 1)[order]).sum()
            (want,) = torch.autograd.grad(want_loss, whole_SBH)
            for one in (loss, taken_loss):
                (gradient,) = torch.autograd.grad(one, rows_SBH, retain_graph=True)
                shared = owned.numel() - whole.tail  # every rank has the tail
                worst = max(worst, relative_error(gradient[:shared], want[owned[:shared]]))
    return differing, worst


def messages(cp, group):
    """Collectives of three shifts of many sequences, forward and backward; and without a graph."""
    whole = packed(PackedRow([2 * cp] * 20, [2 * cp] * 20))
    _, rows_SBH, _, layout = local_rows(whole, cp, group)
    called = []
    with contextlib.ExitStack() as stack:
        for name in TRANSPORTS:
            real = getattr(torch.distributed, name)

            def noting(*args, name=name, real=real, **kwargs):
                called.append(name)
                return real(*args, **kwargs)

            stack.enter_context(mock.patch.object(torch.distributed, name, noting))
        ahead = ShiftedRows.of(rows_SBH, 3, layout)
        sum(ahead.shifted(k).sum() for k in (1, 2, 3)).backward()
        plain = ShiftedRows.of(rows_SBH.detach(), 3, layout)
    kept = [plain.shifted(2), plain.take(1, slice(0, 3))]
    sent = 0 if ahead.heads_SBH is None else ahead.heads_SBH.size(0)
    return called, sent, any(rows.requires_grad for rows in kept)


def waiting(cp, group):
    """Operations of all of it for which the host waits."""
    _, rows_SBH, _, layout = local_rows(wholes(cp)["thd, padded"], cp, group, requires_grad=False)
    index = torch.arange(2, device=device())
    with HostSyncs() as syncs:
        ahead = ShiftedRows.of(rows_SBH, 2, layout)
        ahead.shifted(2), ahead.take(1, index), ahead.take(2, slice(0, 2))
    return syncs.names


def half_precision(cp, group):
    """Whether non-finite padding of bfloat16 rows stays out of rows and gradients."""
    whole = wholes(cp)["thd, padded"]
    _, rows_SBH, owned, layout = local_rows(whole, cp, group)
    real = set(position for start, size in whole.bounds for position in range(start, start + size))
    is_real = torch.tensor([position in real for position in owned.tolist()], device=device())
    rows_SBH = rows_SBH.detach().to(torch.bfloat16)
    rows_SBH = rows_SBH.masked_fill(~is_real[:, None, None], float("nan")).requires_grad_()
    ahead = ShiftedRows.of(rows_SBH, 2, layout)
    everything = torch.cat([ahead.shifted(1).flatten(0, 1), ahead.take(2, slice(None))])
    everything.sum().backward()
    return everything.dtype, bool(everything.isfinite().all() and rows_SBH.grad.isfinite().all())


def test_every_layout_reads_the_rows_ahead_as_plain_lists_do(report):
    assert [differing for differing, _ in report["every_layout"]] == [[]] * len(report["messages"])


def test_gradients_reach_the_ranks_that_hold_the_rows(report):
    assert max(worst for _, worst in report["every_layout"]) <= 1e-12


def test_only_chunk_heads_travel_in_one_message_each_way(report):
    cp = len(report["messages"])
    calls, heads = ([], 0) if cp == 1 else ([GATHER, SCATTER, GATHER], cp * 20 * 2 * 3)
    assert report["messages"] == [(calls, heads, False)] * cp


def test_the_host_never_waits(report):
    assert report["waiting"] == [[]] * len(report["waiting"])


def test_what_padding_holds_stays_out_in_half_precision(report):
    assert report["half_precision"] == [(torch.bfloat16, True)] * len(report["half_precision"])


@pytest.mark.parametrize(
    "shape, reach, k, words",
    [
        ((6, 1, 2), 0, 0, "must be ≥ 1, got 0"),
        ((3, 1, 2), 1, 1, r"6 local positions first, got \(3, 1, 2\)"),
        ((6, 2), 1, 1, r"got \(6, 2\)"),
        ((6, 1, 2), 2, 3, "shifts up to 2, got 3"),
        ((6, 1, 2), 2, -1, "shifts up to 2, got -1"),
    ],
)
def test_what_cannot_be_shifted_is_refused(shape, reach, k, words):
    layout = SequenceLayout.of(torch.zeros(1, 6), packed_seq_params([0, 2, 6]))
    with pytest.raises(ValueError, match=words):
        ShiftedRows.of(torch.zeros(shape), reach, layout).take(k, slice(0, 1))
