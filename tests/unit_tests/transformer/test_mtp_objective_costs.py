"""Objectives with the policy as teacher: precision of bf16, memory, and the host's waiting.

    python -m pytest tests/unit_tests/transformer/test_mtp_objective_costs.py
"""

import pytest
import torch

from tests.support import prepare
from tests.support.host_sync import HostSyncs
from tests.support.recording_ops import LargestOutput
from tests.support.taught_rows import OBJECTIVES, Problem, whole_logits

prepare()

from megatron.core.transformer.mtp_objective.chunk_workspace import Head
from megatron.core.transformer.mtp_objective.chunked import DepthRows, chunked_cross_entropy


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
        teacher = problem.teacher(objective, (0.7, 5, 0.9), chained=True)
        depths = [DepthRows(*r) for r in zip(problem.labels, problem.weights, rows)]
        found, *_ = chunked_cross_entropy(problem.hidden, depths, Head(problem.weight, 4), teacher)
        found.backward()
    assert syncs.names == []
