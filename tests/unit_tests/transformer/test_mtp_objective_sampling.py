"""What top-k and top-p leave of a row, on one rank and over a shared vocabulary.

    python -m pytest tests/unit_tests/transformer/test_mtp_objective_sampling.py
"""

import itertools
import math
from unittest import mock

import pytest
import torch

from tests.support import device, parallel_world, prepare, run_ranks
from tests.support.divergence import kept_tokens

prepare()

from megatron.core.transformer.mtp_objective import sampling
from megatron.core.transformer.mtp_objective import chunk_logits
from megatron.core.transformer.mtp_objective.chunk_logits import Logits, column_blocks
from megatron.core.transformer.mtp_objective.divergences import Divergence, score_in_place
from megatron.core.transformer.mtp_objective.sampling import TeacherSampling, dropped_tokens

N, V = 13, 24
SAMPLINGS = [
    TeacherSampling(1.0, k, p) for k, p in itertools.product((0, 1, 5, V), (1.0, 0.9, 0.5, 1e-6))
]


def logits(ties, seed=0):
    """Rows [n, v]; with ties, of few values."""
    generator = torch.Generator().manual_seed(seed)
    if ties:
        return torch.randint(0, 5, (N, V), generator=generator).double().to(device())
    return torch.randn(N, V, generator=generator, dtype=torch.float64).to(device())


@pytest.mark.parametrize("ties", [False, True], ids=["all differ", "few values"])
@pytest.mark.parametrize("one", SAMPLINGS, ids=lambda one: f"k={one.top_k} p={one.top_p}")
def test_what_is_kept_is_what_the_definition_keeps(one, ties):
    rows = logits(ties)
    dropped = dropped_tokens(rows, one)
    if dropped is None:
        assert not one.top_k and one.top_p == 1
        return
    want = [kept_tokens(row, one.top_k, one.top_p) for row in rows.tolist()]
    assert (~dropped).tolist() == want
    assert (~dropped).any(dim=-1).all()


def probabilities(*values):
    return torch.tensor([values], dtype=torch.float64, device=device()).log()


@pytest.mark.parametrize(
    "row, one, kept",
    [
        ((0.5, 0.3, 0.2), TeacherSampling(1.0, 0, 0.6), [True, True, False]),  # 0.3 crosses 0.6
        ((0.5, 0.3, 0.2), TeacherSampling(1.0, 0, 0.45), [True, False, False]),
        ((0.2, 0.2, 0.2, 0.4), TeacherSampling(1.0, 2, 1.0), [True] * 4),  # equals of the second
        ((0.25, 0.25, 0.25, 0.25), TeacherSampling(1.0, 0, 0.55), [False, True, True, True]),
        ((0.4, 0.3, 0.2, 0.1), TeacherSampling(1.0, 2, 0.5), [True, False, False, False]),
    ],
    ids=["crosses p", "alone is enough", "ties of top-k", "ties of top-p", "p of what k left"],
)
def test_written_out_rows(row, one, kept):
    assert (~dropped_tokens(probabilities(*row), one))[0].tolist() == kept


def test_rows_are_sorted_a_few_at_a_time():
    rows, one = logits(False), TeacherSampling(1.0, 7, 0.8)
    whole = dropped_tokens(rows, one)
    with mock.patch.object(sampling, "_SORTED", 3 * V):
        assert torch.equal(dropped_tokens(rows, one), whole)


def on_ranks(tp):
    """(case, what differs) of a shared vocabulary from the whole one."""
    differing = []
    # Several blocks of columns on each rank.
    blocks = mock.patch.multiple(chunk_logits, _CACHED_LOGITS=0, _FEWEST_COLUMNS=5)
    with parallel_world(tp=tp) as groups, blocks:
        rank, width = groups.tp.rank(), V // tp
        mine = slice(rank * width, (rank + 1) * width)
        for one, ties in itertools.product(SAMPLINGS, (False, True)):
            whole = dropped_tokens(logits(ties), one)
            got = dropped_tokens(logits(ties)[:, mine].contiguous(), one, groups.tp)
            same = got is None if whole is None else torch.equal(got, whole[:, mine])
            if not same:
                differing.append((one, ties))
        for kind, with_labels, one in itertools.product(
            ("kl", "tv", None), (True, False), (SAMPLINGS[0], TeacherSampling(0.7, 9, 0.8))
        ):
            if kind is None and not with_labels:
                continue
            divergence = Divergence(with_labels, kind, 0.3, one)
            labels = torch.arange(N, device=device()) * 7 % V
            found = []
            for columns, group in ((slice(None), None), (mine, groups.tp)):
                head, teacher = (logits(False, i)[:, columns].contiguous() for i in (1, 2))
                scores = score_in_place(Logits(head), Logits(teacher), labels, divergence, group)
                gradient = head / scores.sum_N.unsqueeze(-1)
                found.append((gradient, scores.loss_N, scores.accepted_N, scores.right_N.double()))
            whole = (found[0][0][:, mine], *found[0][1:])
            for what, a, b in zip(("gradient", "loss", "accepted", "right"), whole, found[1]):
                if not torch.allclose(a, b, rtol=1e-12, atol=1e-14):
                    differing.append((kind, with_labels, one, what))
    return differing


@pytest.mark.parametrize("tp", [2, 4])
def test_a_shared_vocabulary_gives_what_a_whole_one_gives(tp):
    assert run_ranks(on_ranks, tp, tp) == [[]] * tp


def test_a_top_p_of_nearly_nothing_keeps_the_most_likely_token():
    rows = logits(False)
    dropped = dropped_tokens(rows, TeacherSampling(1.0, 0, math.ulp(0.0)))
    assert ((~dropped).sum(-1) == 1).all()
    assert torch.equal((~dropped).double().argmax(-1), rows.argmax(-1))


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], TeacherSampling(0.7, 9, 0.8)], ids=str)
@pytest.mark.parametrize(
    "kind, with_labels",
    [("kl", True), ("kl", False), ("tv", True), ("tv", False), (None, True)],
    ids=str,
)
def test_blocks_of_columns_score_as_all_columns_do(monkeypatch, kind, with_labels, sampling):
    divergence, found = Divergence(with_labels, kind, 0.3, sampling), []
    labels = torch.arange(N, device=device()) * 7 % V
    for columns in (V, 7):  # one block, and four of which the last has three columns
        monkeypatch.setattr(chunk_logits, "_CACHED_LOGITS", 0)
        monkeypatch.setattr(chunk_logits, "_FEWEST_COLUMNS", columns)
        head, teacher = (logits(False, seed).contiguous() for seed in (1, 2))
        maxima = [torch.stack([b.amax(-1) for b in column_blocks(z)]) for z in (head, teacher)]
        scores = score_in_place(
            Logits(head, maxima[0]), Logits(teacher, maxima[1]), labels, divergence
        )
        gradient = head / scores.sum_N.unsqueeze(-1)
        found.append((gradient, scores.loss_N, scores.accepted_N, scores.right_N.double()))
    assert len(maxima[0]) == (4 if device().type == "cpu" else 1)
    for one, other in zip(*found):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14) and one.isfinite().all()


@pytest.mark.parametrize("kept", [(0, 1.0), (5, 1.0), (0, 0.9)], ids=str)
def test_a_low_temperature_does_not_magnify_the_rounding_of_large_logits(kept):
    divergence, found = Divergence(False, "kl", 1.0, TeacherSampling(0.01, *kept)), []
    for dtype in (torch.float32, torch.float64):
        # Rounded to single precision first: the question is what scoring adds to that.
        head, teacher = ((300 + 0.02 * logits(False, i)).float().to(dtype) for i in (1, 2))
        labels = torch.zeros(N, dtype=torch.int64, device=device())
        scores = score_in_place(Logits(head), Logits(teacher), labels, divergence)
        found.append((head / scores.sum_N.unsqueeze(-1) / 100, scores.loss_N, scores.accepted_N))
    for single, double in zip(*found):
        assert torch.allclose(single.double(), double, rtol=0, atol=1e-5)
