"""Objectives with the policy as teacher on one rank: values, gradients, and what they leave out.

    python -m pytest tests/unit_tests/transformer/test_mtp_objectives.py
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.support import device, prepare, relative_error
from tests.support.divergence import reference_terms
from tests.support.host_sync import HostSyncs
from tests.support.recording_ops import LargestOutput

prepare()

from megatron.core.transformer.mtp_objective.chunk_workspace import Head
from megatron.core.transformer.mtp_objective.chunked import DepthRows, chunked_cross_entropy
from megatron.core.transformer.mtp_objective.divergences import Divergence
from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.sampling import TeacherSampling
from megatron.core.transformer.mtp_objective.teacher import Teacher

S, B, V, H, D = 9, 3, 37, 8, 2
OBJECTIVES = ("ce", "kl", "tv", "ce+kl", "ce+tv")
SAMPLINGS = {
    "as it is": (1.0, 0, 1.0),
    "T=0.7": (0.7, 0, 1.0),
    "T=1.5 top-k": (1.5, 5, 1.0),
    "top-p": (1.0, 0, 0.6),
    "T=0.7 top-k top-p": (0.7, 11, 0.8),
}
WEIGHT = 0.4


class Problem:
    """Hidden states of policy and depths, a weight, labels, and weights 0 where nothing counts."""

    def __init__(self, supervised=0.6, dtype=torch.float64, sizes=(S, B, V, H), seed=0):
        s, b, v, h = sizes
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.hidden = [randn(s, b, h).to(device(), dtype).requires_grad_() for _ in range(D)]
        self.decoder = randn(s, b, h).to(device(), dtype).requires_grad_()
        self.weight = (randn(v, h) / 2).to(device(), dtype).requires_grad_()
        self.labels = [
            torch.randint(0, v, (b, s), generator=generator).to(device()) for _ in range(D)
        ]
        factor = torch.rand((D, b, s), generator=generator, dtype=torch.float64) + 0.5
        kept = torch.rand((D, b, s), generator=generator, dtype=torch.float64) < supervised
        for depth in range(D):  # nothing to predict behind the end
            kept[depth, :, s - 1 - depth :] = False
        scale = torch.tensor([1e-6, 3e-7]).view(D, 1, 1).double()
        self.weights = list((factor * kept * scale).to(device()))

    def run(self, objective, sampling=(1.0, 0, 1.0), chunk=7, counted=True, chained=False):
        """The objective and the teacher that scored it."""
        divergence = Divergence(
            with_labels=objective.startswith("ce"),
            kind=None if objective == "ce" else objective.removeprefix("ce+"),
            weight=WEIGHT if "+" in objective else 1.0,
            sampling=TeacherSampling(*sampling),
        )
        layout = SequenceLayout.of(self.labels[0])
        teacher = Teacher(self.decoder, D, layout, divergence, chained)
        rows = [
            DepthRows(y, w, int((w != 0).sum()) if counted else None)
            for y, w in zip(self.labels, self.weights)
        ]
        found = chunked_cross_entropy(self.hidden, rows, Head(self.weight, chunk), teacher)
        return (*found, [teacher.token_major(d, self.labels[0].size(0)) for d in range(D)])

    def reference(self, objective, sampling=(1.0, 0, 1.0), chained=False):
        """The same from whole logits and by autograd, with losses and acceptances of each depth."""
        total, chain, losses, accepted = 0, 1.0, [], []
        policy = F.linear(self.decoder, self.weight).detach().transpose(0, 1)
        for depth, (h, y, w) in enumerate(zip(self.hidden, self.labels, self.weights), start=1):
            ahead = torch.cat([policy[:, depth:], torch.zeros_like(policy[:, :depth])], dim=1)
            logits = F.linear(h, self.weight).transpose(0, 1)
            weight = WEIGHT if "+" in objective else 1.0
            terms = reference_terms(logits, ahead, y, objective, weight, sampling)
            total = total + (terms.loss.masked_fill(w == 0, 0) * w * chain).sum()
            if chained:
                chain = chain * terms.accepted.masked_fill(w == 0, 1)
            losses.append(terms.loss.detach().masked_fill(w == 0, 0))
            accepted.append(terms.accepted.masked_fill(w == 0, 1))
        return total, losses, accepted

    def gradients(self, objective, incoming=3.0):
        return torch.autograd.grad(
            objective * incoming,
            [*self.hidden, self.weight, self.decoder],
            allow_unused=True,
            materialize_grads=True,
        )


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
    from tests.support.divergence import policy

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


@pytest.mark.parametrize("objective", OBJECTIVES[1:])
def test_half_precision_is_as_close_to_double_as_whole_logits_are(objective):
    sizes = (64, 2, 501, 64)
    problem = Problem(0.6, torch.bfloat16, sizes)
    exact = Problem(0.6, torch.bfloat16, sizes)
    for name in ("decoder", "weight"):
        setattr(exact, name, getattr(exact, name).detach().double().requires_grad_())
    exact.hidden = [h.detach().double().requires_grad_() for h in exact.hidden]
    want = exact.gradients(exact.reference(objective)[0], 1.0)
    found = problem.gradients(problem.run(objective, chunk=16)[0], 1.0)
    whole = problem.gradients(whole_logits(problem, objective), 1.0)
    for got, usual, right in zip(found[:-1], whole[:-1], want[:-1]):
        error, usual_error = ((g.double() - right).norm() / right.norm() for g in (got, usual))
        assert 0 < error <= 1.05 * usual_error


def whole_logits(problem, objective):
    """The reference with logits rounded as an output layer rounds them, and the rest in float32."""
    total = 0
    policy = F.linear(problem.decoder, problem.weight).detach().float().transpose(0, 1)
    for depth, (h, y, w) in enumerate(zip(problem.hidden, problem.labels, problem.weights), 1):
        ahead = torch.cat([policy[:, depth:], torch.zeros_like(policy[:, :depth])], dim=1)
        logits = F.linear(h, problem.weight).float().transpose(0, 1)
        weight = WEIGHT if "+" in objective else 1.0
        terms = reference_terms(logits, ahead, y, objective, weight)
        total = total + (terms.loss.masked_fill(w == 0, 0) * w.float()).sum()
    return total


@pytest.mark.parametrize("objective, sampling", [("ce+kl", (0.7, 0, 1.0)), ("tv", (0.7, 9, 0.9))])
def test_nothing_larger_than_a_chunk_of_logits_or_an_argument_is_made(objective, sampling):
    for length in (40, 80):
        problem = Problem(0.9, sizes=(length, 2, 101, 8))
        with LargestOutput() as largest:
            problem.gradients(problem.run(objective, sampling, chunk=16)[0])
        assert largest.elements == max(16 * 101, length * 2 * 8)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_host_waits_for_nothing(objective):
    problem = Problem()
    rows = [int((w != 0).sum()) for w in problem.weights]
    assert all(rows)
    with HostSyncs() as syncs:
        divergence = Divergence(
            objective.startswith("ce"), "kl", 1.0, TeacherSampling(0.7, 5, 0.9)
        )
        layout = SequenceLayout.of(problem.labels[0])
        teacher = Teacher(problem.decoder, D, layout, divergence, chained=True)
        depths = [DepthRows(*r) for r in zip(problem.labels, problem.weights, rows)]
        found, *_ = chunked_cross_entropy(problem.hidden, depths, Head(problem.weight, 4), teacher)
        found.backward()
    assert syncs.names == []


def test_a_depth_that_weighs_nothing_is_scored_all_the_same():
    problem = Problem()
    _, losses, _, accepted = problem.run("ce+kl")
    rows = [
        DepthRows(y, torch.zeros_like(w), int((w != 0).sum()), w != 0)
        for y, w in zip(problem.labels, problem.weights)
    ]
    teacher = Teacher(
        problem.decoder,
        D,
        SequenceLayout.of(problem.labels[0]),
        Divergence(True, "kl", WEIGHT, TeacherSampling()),
    )
    objective, got, _ = chunked_cross_entropy(problem.hidden, rows, Head(problem.weight, 7), teacher)
    assert torch.equal(got, losses) and objective == 0
    assert all(torch.equal(teacher.token_major(d, B), accepted[d]) for d in range(D))
    assert not any(g.any() for g in problem.gradients(objective))
