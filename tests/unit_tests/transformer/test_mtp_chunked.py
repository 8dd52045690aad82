"""The chunked objective on one rank: values, gradients, memory, and what it leaves out.

    python -m pytest tests/unit_tests/transformer/test_mtp_chunked.py
"""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import device, prepare, relative_error
from tests.support.host_sync import HostSyncs
from tests.support.recording_ops import LargestOutput

prepare()

from megatron.core.transformer.mtp_objective.chunk_workspace import Head
from megatron.core.transformer.mtp_objective.chunked import DepthRows, chunked_cross_entropy

S, B, V, H, D = 9, 3, 37, 8, 2


def problem(supervised, dtype=torch.float64, sizes=(S, B, V, H), seed=0):
    """Hidden states of two depths, a weight, labels, and weights 0 where nothing is supervised."""
    s, b, v, h = sizes
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden = [randn(s, b, h).to(device(), dtype).requires_grad_() for _ in range(D)]
    weight = randn(v, h).to(device(), dtype).requires_grad_()
    labels = [torch.randint(0, v, (b, s), generator=generator).to(device()) for _ in range(D)]
    factor = torch.rand((D, b, s), generator=generator, dtype=torch.float64) + 0.5
    kept = torch.rand((D, b, s), generator=generator, dtype=torch.float64) < supervised
    # As small as weights of large batches are, and not alike from depth to depth.
    weights = (factor * kept * torch.tensor([1e-6, 3e-7]).view(D, 1, 1).double()).to(device())
    return hidden, weight, labels, list(weights)


def depth_rows(labels, weights, counted=True):
    counts = [int((w != 0).sum()) if counted else None for w in weights]
    return [DepthRows(*row) for row in zip(labels, weights, counts)]


def reference(hidden, weight, labels, weights):
    """Σ w CE from whole logits, in the dtype of its arguments."""
    total = 0
    for h, y, w in zip(hidden, labels, weights):
        rows = h.masked_fill((w == 0).t().unsqueeze(-1), 0)
        logits = F.linear(rows, weight)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(logits.permute(1, 2, 0), y, reduction="none")
        total = total + (losses * w.to(losses.dtype)).sum()
    return total


def gradients(objective, hidden, weight, incoming=3.0):
    return torch.autograd.grad(
        objective * incoming, [*hidden, weight], allow_unused=True, materialize_grads=True
    )


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "every row"])
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize("supervised", [1.0, 0.4, 0.0])
def test_value_and_gradients_are_those_of_whole_logits(supervised, chunk_size, counted):
    hidden, weight, labels, weights = problem(supervised)
    want = reference(hidden, weight, labels, weights)
    head = Head(weight, chunk_size)
    got, losses, right = chunked_cross_entropy(hidden, depth_rows(labels, weights, counted), head)
    assert abs(got.detach() - want.detach()) <= 1e-14 * abs(want.detach())
    for one, other in zip(gradients(got, hidden, weight), gradients(want, hidden, weight)):
        assert relative_error(one, other) <= 1e-12 if supervised else not one.any()
    assert not losses.requires_grad and not right.requires_grad
    for depth in range(D):
        logits = F.linear(hidden[depth], weight).detach().transpose(0, 1)
        expected = F.cross_entropy(logits.flatten(0, 1), labels[depth].flatten(), reduction="none")
        expected = expected.view(B, S).masked_fill(weights[depth] == 0, 0)
        assert torch.allclose(losses[depth], expected, rtol=1e-12, atol=1e-14)
        assert torch.equal(
            right[depth], (logits.argmax(-1) == labels[depth]) & (weights[depth] != 0)
        )


def test_the_logit_scale_is_a_factor_of_the_logits():
    hidden, weight, labels, weights = problem(0.5)
    head = Head(weight, 4, logit_scale=0.25)
    got = gradients(chunked_cross_entropy(hidden, depth_rows(labels, weights), head)[0], hidden, weight)
    want = gradients(reference(hidden, weight * 0.25, labels, weights), hidden, weight)
    assert all(relative_error(one, other) <= 1e-12 for one, other in zip(got, want))


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "every row"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_does_not_count_may_be_anything(bad, counted):
    hidden, weight, labels, weights = problem(0.4)
    spoiled = [
        h.detach().masked_fill((w == 0).t().unsqueeze(-1), bad).requires_grad_()
        for h, w in zip(hidden, weights)
    ]
    rows = depth_rows(labels, weights, counted)
    got, losses, _ = chunked_cross_entropy(spoiled, rows, Head(weight, 5))
    want, *_ = chunked_cross_entropy(hidden, rows, Head(weight, 5))
    assert losses.isfinite().all()
    for one, other in zip(gradients(got, spoiled, weight), gradients(want, hidden, weight)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("incoming", [1.0, 65536.0], ids=["bf16", "loss scale"])
def test_half_precision_is_as_close_to_double_as_whole_logits_are(incoming):
    sizes = (64, 2, 501, 64)
    hidden, weight, labels, weights = problem(0.6, torch.bfloat16, sizes)
    double = [h.detach().double().requires_grad_() for h in hidden]
    double_weight = weight.detach().double().requires_grad_()
    exact = gradients(
        reference(double, double_weight, labels, weights), double, double_weight, incoming
    )
    whole = gradients(reference(hidden, weight, labels, weights), hidden, weight, incoming)
    objective, *_ = chunked_cross_entropy(hidden, depth_rows(labels, weights), Head(weight, 16))
    chunked = gradients(objective, hidden, weight, incoming)
    for got, usual, right in zip(chunked, whole, exact):
        error = (got.double() - right).norm() / right.norm()
        assert error <= 1.05 * (usual.double() - right).norm() / right.norm()
        assert error > 0


def test_tiny_weights_do_not_vanish_in_half_precision():
    hidden, weight, labels, weights = problem(1.0, torch.float16)
    tiny = [w * 1e-6 for w in weights]  # 1e-12, below what float16 can hold
    objective, *_ = chunked_cross_entropy(hidden, depth_rows(labels, tiny), Head(weight, 8))
    got = gradients(objective, hidden, weight, 1e12)
    double = [h.detach().double().requires_grad_() for h in hidden], weight.detach().double()
    double[1].requires_grad_()
    want = gradients(reference(*double, labels, tiny), *double, 1e12)
    assert all(relative_error(one, other) <= 1e-2 for one, other in zip(got, want))


@pytest.mark.parametrize(
    "largest", [2.0**127, 3.4e38, 2.0**-149], ids=["2^127", "near the end of float32", "2^-149"]
)
def test_weights_at_the_ends_of_single_precision_give_the_gradients_of_others(largest):
    hidden, weight, labels, weights = problem(1.0, torch.float32)
    places = [torch.ones_like(w, dtype=torch.float32) for w in weights]
    found = []
    # What comes in brings gradients back to where float32 holds them.
    for factor, incoming in ((1.0, 1.0), (largest, 2.0**-149 if largest > 1 else 2.0**127)):
        rows = depth_rows(labels, [place * factor for place in places])
        objective, *_ = chunked_cross_entropy(hidden, rows, Head(weight, 8))
        incoming = torch.full_like(objective, incoming)
        got = torch.autograd.grad(objective, [*hidden, weight], incoming)
        found.append([one.double() / factor / incoming.double() for one in got])
    for want, got in zip(*found):
        assert got.any() and relative_error(got, want) <= 1e-6


class NumbersTakeTheDtype(TorchDispatchMode):
    """Rounds a tensor without dimensions to the dtype of what it multiplies, as a GPU does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mul", "mul_") and isinstance(args[1], torch.Tensor):
            if args[0].dim() > 0 and args[1].dim() == 0:
                args = args[0], args[1].to(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "dtype, incoming",
    [(torch.bfloat16, 1 / 3), (torch.float16, 2.0**18)],
    ids=["one of three microbatches", "a loss scale that float16 cannot hold"],
)
def test_the_factor_that_backward_brings_is_not_rounded_to_half_precision(dtype, incoming):
    hidden, weight, labels, weights = problem(0.6, dtype)
    weight = weight.detach() * 2**-12  # small gradients, which fit float16 when multiplied
    weights = [w / w.amax() for w in weights]
    rows, found = depth_rows(labels, weights), []
    for mode in (contextlib.nullcontext(), NumbersTakeTheDtype()):
        objective, *_ = chunked_cross_entropy(hidden, rows, Head(weight, 8))
        with mode:
            found.append(torch.autograd.grad(objective, hidden, torch.full_like(objective, incoming)))
    for want, got in zip(*found):
        assert want.isfinite().all() and want.any() and torch.equal(got, want)


def test_nothing_larger_than_a_chunk_of_logits_or_an_argument_is_made():
    sizes, chunk_size = (40, 2, 101, 8), 16
    hidden, weight, labels, weights = problem(0.9, sizes=sizes)
    with LargestOutput() as whole:
        gradients(reference(hidden, weight, labels, weights), hidden, weight)
    with LargestOutput() as chunked:
        objective, *_ = chunked_cross_entropy(
            hidden, depth_rows(labels, weights), Head(weight, chunk_size)
        )
        gradients(objective, hidden, weight)
    assert whole.elements == 40 * 2 * 101
    assert chunked.elements == chunk_size * 101


def test_a_depth_without_supervised_rows_is_not_projected():
    hidden, weight, labels, weights = problem(1.0)
    weights[0] = torch.zeros_like(weights[0])
    with LargestOutput() as counter:
        objective, losses, _ = chunked_cross_entropy(
            hidden, depth_rows(labels, weights), Head(weight, S * B)
        )
    assert counter.products == 3  # logits, gradient of hidden states, of the weight: of one depth
    got = gradients(objective, hidden, weight)
    assert not got[0].any() and got[1].all() and not losses[0].any()


def test_a_detached_weight_gets_no_gradient_and_costs_no_product():
    hidden, weight, labels, weights = problem(1.0)
    with LargestOutput() as counter:
        objective, *_ = chunked_cross_entropy(
            hidden, depth_rows(labels, weights), Head(weight.detach(), S * B)
        )
    assert counter.products == 2 * D
    objective.backward()
    assert weight.grad is None and all(h.grad.all() for h in hidden)


def test_the_host_waits_for_nothing():
    hidden, weight, labels, weights = problem(0.5)
    rows = depth_rows(labels, weights)
    with HostSyncs() as syncs:
        objective, *_ = chunked_cross_entropy(hidden, rows, Head(weight, 4))
        objective.backward()
    assert syncs.names == []
    with HostSyncs() as syncs:
        hidden[0][weights[0].t() != 0].sum().item()
    assert syncs.names == ["index", "item", "_local_scalar_dense"]


def test_a_second_backward_is_refused_with_what_to_do():
    hidden, weight, labels, weights = problem(0.5)
    objective, *_ = chunked_cross_entropy(hidden, depth_rows(labels, weights), Head(weight, 4))
    objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once, in forward.*retain_graph=True.*chunk_size=0"):
        objective.backward()


@pytest.mark.parametrize("flagged", [False, True], ids=["without DDP's flag", "with DDP's flag"])
def test_fused_accumulation_adds_the_weight_gradient_to_main_grad(flagged):
    hidden, weight, labels, weights = problem(0.5)
    rows = depth_rows(labels, weights)
    want = gradients(chunked_cross_entropy(hidden, rows, Head(weight, 4))[0], hidden, weight)[-1]
    weight.main_grad = torch.ones_like(weight)
    if flagged:
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    head = Head(weight, 4, fuse_weight_gradient=True)
    objective, *_ = chunked_cross_entropy(hidden, rows, head)
    (objective * 3.0).backward()
    assert torch.equal(weight.main_grad, 1 + want)
    if flagged:
        assert weight.grad_added_to_main_grad and not weight.grad.any()
    else:
        assert weight.grad is None
