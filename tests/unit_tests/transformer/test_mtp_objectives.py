"""Objectives with the policy as teacher on one rank: values, gradients, and what they leave out.

    python -m pytest tests/unit_tests/transformer/test_mtp_objectives.py
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.support import device, prepare, relative_error
from tests.support.divergence import policy
from tests.support.taught_rows import OBJECTIVES, B, D, Problem, S

prepare()

from megatron.core.transformer.mtp_objective.chunk_workspace import Head
from megatron.core.transformer.mtp_objective.chunked import DepthRows, chunked_cross_entropy

SAMPLINGS = {
    "as it is": (1.0, 0, 1.0),
    "T=0.7": (0.7, 0, 1.0),
    "T=1.5 top-k": (1.5, 5, 1.0),
    "top-p": (1.0, 0, 0.6),
    "T=0.7 top-k top-p": (0.7, 11, 0.8),
}
CASES = [
    (objective, name, 7, True) for objective in OBJECTIVES for name in SAMPLINGS
] + [
    (objective, "T=0.7 top-k top-p", chunk, counted)
    for objective in OBJECTIVES
    for chunk, counted in ((1, True), (1000, True), (7, False))
]


@pytest.mark.parametrize("objective, sampling, chunk, counted", CASES)
def test_values_and_gradients_are_those_of_the_definition(objective, sampling, chunk, counted):
    problem = Problem()
    want, losses, accepted = problem.reference(objective, SAMPLINGS[sampling])
    got, got_losses, _, got_accepted = problem.run(objective, SAMPLINGS[sampling], chunk, counted)
    assert abs(got - want) <= 1e-12 * abs(want)
    found = problem.gradients(got)
    assert not found[-1].any()  # the policy is not taught
    for one, other in zip(found[:-1], problem.gradients(want)[:-1]):
        assert other.any() and relative_error(one, other) <= 1e-12
    for depth in range(D):
        assert torch.allclose(got_losses[depth], losses[depth], rtol=1e-12, atol=1e-13)
        assert torch.allclose(got_accepted[depth], accepted[depth], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_chained_depths_weigh_what_is_accepted_before_them(objective):
    problem = Problem()
    sampling = SAMPLINGS["T=0.7"]
    want, losses, _ = problem.reference(objective, sampling, chained=True)
    got, got_losses, *_ = problem.run(objective, sampling, chained=True)
    assert abs(got - want) <= 1e-12 * abs(want)
    uniform = problem.gradients(problem.run(objective, sampling)[0])
    found = problem.gradients(got)
    for one, other in zip(found[:-1], problem.gradients(want)[:-1]):
        assert relative_error(one, other) <= 1e-12
    assert torch.equal(found[0], uniform[0]) and not torch.equal(found[1], uniform[1])
    assert torch.allclose(got_losses[1], losses[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("objective", OBJECTIVES[1:])
def test_gradients_are_those_of_finite_differences(objective):
    problem = Problem(supervised=1.0, sizes=(4, 1, 5, 3))
    problem.weights = [w * 1e6 for w in problem.weights]
    sampling = (0.8, 4, 0.9)
    found = problem.gradients(problem.run(objective, sampling)[0])
    step = 1e-6
    for tensor, gradient in zip([*problem.hidden, problem.weight], found):
        if tensor is problem.weight:
            continue  # the teacher's logits move with it
        for place in itertools.product(*map(range, tensor.shape)):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    tensor[place] += sign * step
                    values.append(problem.run(objective, sampling)[0].item())
                    tensor[place] -= sign * step
            slope = 3 * (values[0] - values[1]) / (2 * step)
            assert gradient[place].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_a_head_that_is_the_policy_has_nothing_to_learn_and_is_always_accepted():
    problem = Problem(supervised=1.0)
    ahead = [torch.cat([problem.decoder[k:], problem.decoder[:k]]) for k in (1, 2)]
    problem.hidden = [h.detach().clone().requires_grad_() for h in ahead]
    for objective in ("kl", "tv"):
        got, losses, _, accepted = problem.run(objective, (0.7, 0, 1.0))
        assert abs(losses).max() <= 1e-14
        assert all((a - 1).abs().max() <= 1e-14 for a in accepted)
        assert all(g.abs().max() <= 1e-20 for g in problem.gradients(got)[:D])


def test_acceptance_is_what_rejection_sampling_accepts_on_average():
    """Of 200,000 drafts from q, x is accepted with probability min(1, p(x) / q(x))."""
    problem = Problem(supervised=1.0, sizes=(2, 1, 12, 4))
    sampling = (0.6, 6, 0.9)
    *_, accepted = problem.run("kl", sampling)
    z = F.linear(problem.hidden[0][0, 0], problem.weight).detach() / 0.6
    u = F.linear(problem.decoder[1, 0], problem.weight).detach()
    p, q = policy(u[None], *sampling)[0].cpu(), z.softmax(0).cpu()
    generator = torch.Generator().manual_seed(0)
    n = 200_000
    drafts = torch.multinomial(q, n, replacement=True, generator=generator)
    coins = torch.rand(n, generator=generator, dtype=torch.float64)
    rate = (coins < p[drafts] / q[drafts]).double().mean().item()
    exact = accepted[0][0, 0].item()
    assert 0.05 < exact < 0.95
    assert rate == pytest.approx(exact, abs=2.58 * math.sqrt(exact * (1 - exact) / n))


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "every row"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("objective", ["kl", "ce+tv"])
def test_rows_that_do_not_count_may_be_anything_in_heads_and_policy(objective, bad, counted):
    problem, spoiled = Problem(0.3), Problem(0.3)
    read = torch.zeros(S, B, dtype=torch.bool, device=device())  # by some teacher
    for depth, (h, w) in enumerate(zip(spoiled.hidden, spoiled.weights), start=1):
        counts_SB = (w != 0).t()
        h.data.masked_fill_(~counts_SB.unsqueeze(-1), bad)
        read[depth:] |= counts_SB[:-depth]
    assert not read.all()
    if counted:
        spoiled.decoder.data.masked_fill_(~read.unsqueeze(-1), bad)
    else:
        spoiled.decoder.data[0] = bad  # read by no depth, counted or not
        spoiled.decoder.data.masked_fill_(~read.unsqueeze(-1), bad)
    want, got = (p.run(objective, (0.7, 9, 0.9), 5, counted) for p in (problem, spoiled))
    for one, other in zip(spoiled.gradients(got[0]), problem.gradients(want[0])):
        assert torch.equal(one, other)
    assert all(a.isfinite().all() for a in got[3])


def test_a_depth_that_weighs_nothing_is_scored_all_the_same():
    problem = Problem()
    _, losses, _, accepted = problem.run("ce+kl")
    rows = [
        DepthRows(y, torch.zeros_like(w), int((w != 0).sum()), w != 0)
        for y, w in zip(problem.labels, problem.weights)
    ]
    teacher, head = problem.teacher("ce+kl"), Head(problem.weight, 7)
    objective, got, _ = chunked_cross_entropy(problem.hidden, rows, head, teacher)
    assert torch.equal(got, losses) and objective == 0
    assert all(torch.equal(teacher.token_major(d, B), accepted[d]) for d in range(D))
    assert not any(g.any() for g in problem.gradients(objective))
