"""Detached heads recompute, and are clipped by a gradient norm of their own.

    python -m pytest tests/unit_tests/transformer/test_mtp_detach_heads.py
"""

import pytest
import torch

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_model,
    is_mtp_param,
    parallel_world,
    prepare,
    thd_batch,
)
from tests.support.ddp_training import Trainer, Training, global_batch, microbatches
from tests.support.objective import step_gradients

prepare()

OPTIMIZERS = {
    "adam": dict(),
    "distributed": dict(distributed_optimizer=True),
}
CLIP = 1e-3


@pytest.fixture(scope="module", autouse=True)
def groups():
    with parallel_world() as groups:
        yield groups


def stepped(groups, optimizer="adam", num_experts=0, detach=True, clip_grad=CLIP):
    """A trainer after one step, its gradients before and after clipping, and the norm returned."""
    spec = ModelSpec(
        dtype=torch.float32, num_experts=num_experts, overrides=dict(mtp_detach_heads=detach)
    )
    # On token losses: logits beside labels come later in the series.
    options = dict(return_logits=False, overlap_grad_reduce=False, clip_grad=clip_grad)
    trainer = Trainer(spec, Training(**options, **OPTIMIZERS[optimizer]), groups)
    trainer.backward(microbatches(global_batch(0), groups))
    before = trainer.gradients()
    _, norm, _ = trainer.optimizer.step()
    return trainer, before, trainer.gradients(), float(norm)


def norm_of(gradients, heads):
    chosen = [g for name, g in gradients.items() if is_mtp_param(name) == heads]
    return torch.stack([g.double().norm() for g in chosen]).norm().item()


@pytest.mark.parametrize("num_experts", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_norm_that_is_reported_is_the_one_without_heads(groups, optimizer, num_experts):
    trainer, before, _, norm = stepped(groups, optimizer, num_experts)
    assert norm == pytest.approx(norm_of(before, heads=False), rel=1e-5)
    of_heads = trainer.optimizer.grad_norms_by_group["mtp"]
    assert float(of_heads) == pytest.approx(norm_of(before, heads=True), rel=1e-5)


@pytest.mark.parametrize("num_experts", [0, 2])
def test_heads_and_policy_are_each_scaled_down_to_the_limit(groups, num_experts):
    _, before, after, _ = stepped(groups, num_experts=num_experts)
    for heads in (False, True):
        assert norm_of(before, heads) > 2 * CLIP
        assert norm_of(after, heads) == pytest.approx(CLIP, rel=1e-2)


def test_attached_heads_share_one_norm_with_the_policy(groups):
    _, before, after, norm = stepped(groups, detach=False)
    both = (norm_of(before, False) ** 2 + norm_of(before, True) ** 2) ** 0.5
    assert norm == pytest.approx(both, rel=1e-5)
    for heads in (False, True):
        assert norm_of(after, heads) / norm_of(before, heads) == pytest.approx(CLIP / both, rel=1e-2)


def test_without_clipping_no_gradient_is_scaled(groups):
    _, before, after, _ = stepped(groups, clip_grad=0.0)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_recomputing_the_heads_changes_no_gradient_of_detached_ones(groups, layout):
    batch = bshd_batch(2, 8) if layout == "bshd" else thd_batch((5, 3))
    wanted, got = (
        step_gradients(
            build_model(ModelSpec(recompute=recompute, overrides=dict(mtp_detach_heads=True))),
            batch,
        )
        for recompute in ("none", "full")
    )
    assert norm_of(got, heads=True) > 0
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
