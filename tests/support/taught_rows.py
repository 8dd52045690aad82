"""Rows of heads that the policy teaches: a random problem, solved in chunks and by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.device import device
from tests.support.divergence import reference_terms

SIZES = S, B, V, H = 9, 3, 37, 8
D = 2
OBJECTIVES = ("ce", "kl", "tv", "ce+kl", "ce+tv")
WEIGHT = 0.4  # of the second term of a sum


def divergence_of(objective, sampling=(1.0, 0, 1.0)):
    """The `Divergence` of an objective, with `WEIGHT`."""
    from megatron.core.transformer.mtp_objective.divergences import Divergence
    from megatron.core.transformer.mtp_objective.sampling import TeacherSampling

    return Divergence(
        with_labels=objective.startswith("ce"),
        kind=None if objective == "ce" else objective.removeprefix("ce+"),
        weight=WEIGHT if "+" in objective else 1.0,
        sampling=TeacherSampling(*sampling),
    )


class Problem:
    """Hidden states of policy and depths, a weight, labels, and weights 0 where nothing counts."""

    def __init__(self, supervised=0.6, dtype=torch.float64, sizes=SIZES, seed=0):
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

    def teacher(self, objective, sampling=(1.0, 0, 1.0), chained=False):
        """The policy as a teacher of one forward."""
        from megatron.core.transformer.mtp_objective.layout import SequenceLayout
        from megatron.core.transformer.mtp_objective.teacher import Teacher

        layout = SequenceLayout.of(self.labels[0])
        return Teacher(self.decoder, D, layout, divergence_of(objective, sampling), chained)

    def run(self, objective, sampling=(1.0, 0, 1.0), chunk=7, counted=True, chained=False):
        """Objective, losses and hits of each depth, and per depth the acceptances [b, s]."""
        from megatron.core.transformer.mtp_objective.chunk_workspace import Head
        from megatron.core.transformer.mtp_objective.chunked import DepthRows
        from megatron.core.transformer.mtp_objective.chunked import chunked_cross_entropy

        teacher = self.teacher(objective, sampling, chained)
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
        """Of the heads' hidden states, the weight, and the policy's hidden states."""
        return torch.autograd.grad(
            objective * incoming,
            [*self.hidden, self.weight, self.decoder],
            allow_unused=True,
            materialize_grads=True,
        )


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
