"""Logits in blocks of columns: the same numbers as all columns at once.

    python -m pytest tests/unit_tests/transformer/test_mtp_chunk_logits.py

A CPU works in blocks; elsewhere these tests see one block.
"""

import math
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import device, parallel_world, prepare, relative_error, run_ranks

prepare()

from megatron.core.transformer.mtp_objective import chunk_logits
from megatron.core.transformer.mtp_objective.chunk_logits import Logits, column_blocks
from megatron.core.transformer.mtp_objective.chunk_workspace import ChunkWorkspace, Head
from megatron.core.transformer.mtp_objective.chunked import DepthRows, chunked_cross_entropy
from megatron.core.transformer.mtp_objective.divergences import Divergence, score_in_place
from megatron.core.transformer.mtp_objective.sampling import TeacherSampling
from megatron.core.transformer.mtp_objective.vocab_parallel import cross_entropy_in_place

ROWS, COLUMNS, WIDTH = 20, 101, 8


@pytest.fixture
def narrow_blocks(monkeypatch):
    """Blocks of 7 columns, whatever the rows; the last of 101 has 3."""
    monkeypatch.setattr(chunk_logits, "_CACHED_LOGITS", 0)
    monkeypatch.setattr(chunk_logits, "_FEWEST_COLUMNS", 7)


def problem(dtype=torch.float64):
    """Hidden states of one depth, a weight, labels and the rows' weights."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, 1, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(COLUMNS, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, COLUMNS, (1, ROWS), generator=generator)
    weights = torch.rand(1, ROWS, generator=generator, dtype=torch.float64)
    hidden, weight = (value.to(device(), dtype).requires_grad_() for value in (hidden, weight))
    return hidden, weight, labels.to(device()), weights.to(device())


@pytest.mark.parametrize("looked", [True, False], ids=["maxima known", "maxima unknown"])
@pytest.mark.parametrize("columns", [1, 255, 256, 257, 1024])
def test_of_several_largest_logits_the_first_counts(monkeypatch, columns, looked):
    monkeypatch.setattr(chunk_logits, "_CACHED_LOGITS", 64 * 100)  # blocks of 100 columns
    monkeypatch.setattr(chunk_logits, "_FEWEST_COLUMNS", 1)
    generator = torch.Generator().manual_seed(0)
    # Few values: nearly every row has its largest several times, in one block and in others.
    values = torch.randint(0, 4, (64, columns), generator=generator).double().to(device())
    values[0, -1] = math.nan
    maxima = torch.stack([block.amax(dim=-1) for block in column_blocks(values)])
    found, places = Logits(values, maxima if looked else None).first_max()
    assert places[1:].tolist() == [row.index(max(row)) for row in values[1:].tolist()]
    assert found[1:].tolist() == values[1:].amax(dim=-1).tolist()
    assert places[0] == columns - 1 and found[0].isnan()


@pytest.mark.parametrize("isolated", [False, True], ids=["weight trained", "isolated"])
@pytest.mark.parametrize("chunk_size", [1, 6, 20])
def test_blocks_give_the_losses_and_gradients_of_torch(narrow_blocks, chunk_size, isolated):
    hidden, weight, labels, weights = problem()
    head_weight = weight.detach() if isolated else weight
    depth = DepthRows(labels, weights, count=ROWS)
    got, losses, right = chunked_cross_entropy([hidden], [depth], Head(head_weight, chunk_size))
    logits = torch.nn.functional.linear(hidden[:, 0], head_weight)
    want_losses = torch.nn.functional.cross_entropy(logits, labels[0], reduction="none")
    want = (want_losses * weights[0]).sum()
    trained = [hidden] if isolated else [hidden, weight]
    pairs = zip(torch.autograd.grad(got, trained), torch.autograd.grad(want, trained))
    assert all(relative_error(one, other) <= 1e-12 for one, other in pairs)
    assert torch.allclose(losses[0, 0], want_losses.detach(), rtol=1e-12, atol=1e-14)
    assert torch.equal(right[0, 0], logits.argmax(dim=-1) == labels[0])


@pytest.mark.parametrize("shift", [-1e3, 1e3, 3e4], ids=str)
def test_large_logits_neither_overflow_nor_lose_their_differences(narrow_blocks, shift):
    hidden, weight, labels, weights = problem(torch.float32)
    with torch.no_grad():  # the same number is added to all logits of a row
        weight[:, 0] = shift
        hidden[..., 0] = 1.0
    depth = DepthRows(labels, weights, count=ROWS)
    objective, losses, _ = chunked_cross_entropy([hidden], [depth], Head(weight, 6))
    logits = torch.nn.functional.linear(hidden[:, 0], weight).detach()
    exact = torch.nn.functional.cross_entropy(logits.double(), labels[0], reduction="none")
    # What single precision can say of logits of this size.
    assert (losses[0, 0] - exact).abs().max() <= 4 * torch.finfo(torch.float32).eps * abs(shift)
    gradients = torch.autograd.grad(objective, [hidden, weight])
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


def test_projected_logits_come_with_the_maxima_of_their_blocks(narrow_blocks):
    hidden, weight, _, _ = problem()
    head = Head(weight.detach(), ROWS, logit_scale=0.5)
    workspace = ChunkWorkspace(head, ROWS, weight.dtype, False)
    rows = hidden.detach()[:13, 0]
    logits = workspace.project(rows)
    assert relative_error(logits.values_NV, rows @ weight.detach().t() / 2) <= 1e-14
    blocks = column_blocks(logits.values_NV)
    want = torch.stack([block.amax(dim=-1) for block in blocks])
    if device().type == "cpu":
        assert len(blocks) == 15 and torch.equal(logits.maxima_KN, want)
        assert logits.values_NV.stride() == (1, ROWS)  # the rows of a column side by side


@pytest.mark.parametrize("rows", [ROWS, 13], ids=["a whole chunk", "the last one"])
@pytest.mark.parametrize("incoming", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_logits_of_every_dtype_are_those_of_the_product(narrow_blocks, incoming, rows):
    hidden, weight, _, _ = problem(incoming)
    dtype = torch.float64 if incoming == torch.float64 else torch.float32
    head = Head(weight.detach(), ROWS, logit_scale=0.5)
    logits = ChunkWorkspace(head, ROWS, dtype, False).project(hidden.detach()[:rows, 0])
    want = hidden.detach()[:rows, 0].double() @ weight.detach().double().t() / 2
    assert logits.values_NV.dtype == dtype
    assert relative_error(logits.values_NV.double(), want) <= 4 * torch.finfo(incoming).eps


@pytest.mark.parametrize("shift", [0, 300, -3000], ids=str)
def test_differences_of_large_logits_are_as_exact_as_those_of_small_ones(narrow_blocks, shift):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, COLUMNS, generator=generator) * 5 + shift
    labels = values.argmax(dim=-1)
    values[torch.arange(0, ROWS, 2), labels[::2]] += 40  # certain: nothing is left to lose
    exact = torch.nn.functional.cross_entropy(values.double(), labels, reduction="none")
    values, labels, exact = (tensor.to(device()) for tensor in (values, labels, exact))
    loss = cross_entropy_in_place(Logits(values), labels).loss_N
    assert (loss >= 0).all() and (loss[::2] == 0).all()
    assert (loss - exact).abs().max() <= 1e-5


def test_columns_of_minus_infinity_and_of_the_smallest_number_count_as_nothing(narrow_blocks):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, COLUMNS, generator=generator).to(device())
    values[:, 50:], values[::3, :14] = -math.inf, torch.finfo(values.dtype).min
    labels = torch.arange(14, 14 + ROWS, device=device())
    want = torch.nn.functional.cross_entropy(values, labels, reduction="none")
    loss = cross_entropy_in_place(Logits(values), labels).loss_N
    assert torch.allclose(loss, want, rtol=1e-5)
    assert values.isfinite().all() and not values[:, 50:].any() and not values[::3, :14].any()


def shared_and_whole(tp):
    """Loss, hits and gradient of this rank's columns in blocks, and of all columns in one."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 40, (ROWS, 2 * COLUMNS), generator=generator).double() / 8
    labels = torch.randint(0, 2 * COLUMNS, (ROWS,), generator=generator)
    labels[0], labels[1] = 2 * COLUMNS + 3, -100  # no rank holds them
    labels[2:6] = values[2:6].argmax(dim=-1)
    values, labels, found = values.to(device()), labels.to(device()), []
    with parallel_world(tp=tp) as groups:
        width = 2 * COLUMNS // tp
        mine = slice(groups.tp.rank() * width, (groups.tp.rank() + 1) * width)
        for columns, group, part in ((7, groups.tp, mine), (1000, None, slice(None))):
            blocks = dict(_CACHED_LOGITS=0, _FEWEST_COLUMNS=columns)
            with mock.patch.multiple(chunk_logits, **blocks):
                logits = values[:, part].contiguous()
                maxima = torch.stack([block.amax(dim=-1) for block in column_blocks(logits)])
                result = cross_entropy_in_place(Logits(logits, maxima), labels, group)
            gradient = logits / result.sum_N.unsqueeze(-1)
            gradient = gradient[:, mine] if group is None else gradient
            found.append([result.loss_N.cpu(), result.right_N.cpu(), gradient.cpu()])
    return found


def test_blocks_of_a_shared_vocabulary_give_what_the_whole_one_gives():
    for got, want in run_ranks(shared_and_whole, 2, 2):
        assert torch.equal(got[1], want[1]) and got[1].any()
        assert all(relative_error(got[i], want[i]) <= 1e-13 for i in (0, 2))


class _Calls(TorchDispatchMode):
    """Names of the operations inside it that return as many numbers as a chunk has logits."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(first, torch.Tensor) and first.numel() == ROWS * COLUMNS:
            self.names.append(func.overloadpacket.__name__)
        return out


def test_elsewhere_than_on_a_cpu_logits_are_one_block_row_by_row():
    weight = torch.empty(COLUMNS, WIDTH, device="meta")
    workspace = ChunkWorkspace(Head(weight, ROWS), ROWS, weight.dtype, False)
    logits = workspace.project(weight.new_empty(ROWS, WIDTH))
    assert logits.values_NV.is_contiguous() and logits.maxima_KN is None
    assert len(column_blocks(logits.values_NV)) == 1


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_elsewhere_than_on_a_cpu_nothing_is_kept_while_top_p_sorts_nor_clamped(kind):
    head, teacher = (torch.empty(ROWS, COLUMNS, device="meta") for _ in range(2))
    labels = torch.zeros(ROWS, dtype=torch.int64, device="meta")
    divergence = Divergence(False, kind, 1.0, TeacherSampling(0.7, 0, 0.9))
    with _Calls() as calls:
        score_in_place(Logits(head), Logits(teacher), labels, divergence)
    before = calls.names[: calls.names.index("sort")]
    assert not {"empty_like", "new_empty", "exp", "mul", "sub", "div"} & set(before)
    assert "clamp" not in calls.names
    assert calls.names.count("empty_like") == (2 if kind == "kl" else 1)  # one of the sort's own
