"""What forward promises about MTP work whose result nobody can use: it is not done."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.support.contract import (
    VOCABULARY,
    ModelContract,
    inputs,
    mtp_gradients,
    sampled_batch,
    tracker,
)
from tests.support.gradients import grads_by_name
from tests.support.models import is_mtp_param
from tests.support.release import counts_acceptance, loss_key

# name: (mode, gradients enabled, config fields, call options)
USELESS: dict[str, tuple[str, bool, dict[str, Any], dict[str, Any]]] = {
    "training without gradients": ("train", False, {}, {}),
    "eval without gradients": ("eval", False, {}, {}),
    "the caller says so": ("train", True, {}, dict(compute_mtp_loss=False)),
    "the caller says so in eval": ("eval", True, {}, dict(compute_mtp_loss=False)),
    "a scaling factor of zero": ("train", True, dict(mtp_loss_scaling_factor=0.0), {}),
    "no scaling factor": ("train", True, dict(mtp_loss_scaling_factor=None), {}),
}


class SkippedHeadsContract(ModelContract):
    """Block never, head once, the same logits, no metric; and a skip only where it is right."""

    @pytest.mark.parametrize("with_labels", [False, True])
    @pytest.mark.parametrize("reason", USELESS)
    def test_heads_do_not_run_when_nobody_can_use_their_result(self, reason, with_labels):
        mode, with_gradients, config, options = USELESS[reason]
        model, batch = self.build(**config).train(mode == "train"), sampled_batch()
        kwargs = batch.forward_kwargs() if with_labels else inputs(batch)
        with torch.set_grad_enabled(with_gradients), calls_of(model) as calls:
            logits_BSV = model(**kwargs, **options, return_logits=with_labels)
        assert calls == dict(block=0, head=1)
        assert tracker() == {}
        wanted = self.build().train(mode == "train")
        assert torch.equal(logits_BSV, wanted(**batch.forward_kwargs(), return_logits=True))

    def test_logits_in_eval_are_made_without_the_heads_even_with_gradients(self):
        model, batch = self.build().eval(), sampled_batch()
        with calls_of(model) as calls:
            logits_BSV = model(**inputs(batch))
        assert calls == dict(block=0, head=1)
        logits_BSV.sum().backward()
        touched = {n for n, p in model.named_parameters() if p.grad is not None}
        assert touched == {n for n, _ in model.named_parameters() if not is_mtp_param(n)}

    @pytest.mark.parametrize("reason", USELESS)
    def test_token_losses_are_the_same_without_the_heads(self, reason):
        mode, with_gradients, config, options = USELESS[reason]
        model, batch = self.build(**config).train(mode == "train"), sampled_batch()
        with torch.set_grad_enabled(with_gradients), calls_of(model) as calls:
            losses_BS = model(**batch.forward_kwargs(), **options)
        assert calls == dict(block=0, head=1)
        assert tracker() == {}
        wanted = self.build().train(mode == "train")
        assert torch.equal(losses_BS, wanted(**batch.forward_kwargs()))

    @pytest.mark.parametrize("return_logits", [False, True])
    def test_a_training_step_runs_the_block_once_and_the_head_for_every_depth(self, return_logits):
        model, batch = self.build(mtp_num_layers=3), sampled_batch()
        with calls_of(model) as calls:
            model(**batch.forward_kwargs(), return_logits=return_logits)
        assert calls == dict(block=1, head=1 + 3)
        assert tracker()[loss_key()].all()
        if counts_acceptance():
            assert tracker()["total_values"].tolist() == [16, 16, 16]

    @pytest.mark.parametrize("return_logits", [False, True])
    def test_eval_with_labels_and_gradients_still_trains_and_logs_nothing(self, return_logits):
        model, batch = self.build(mtp_isolated_loss=True).eval(), sampled_batch()
        with calls_of(model) as calls:
            (model(**batch.forward_kwargs(), return_logits=return_logits) * 0).sum().backward()
        assert calls == dict(block=1, head=3)
        assert tracker() == {}
        gradients = grads_by_name(model)
        assert {n for n, g in gradients.items() if g.any()} == set(filter(is_mtp_param, gradients))

    def test_heads_switched_off_keep_every_gradient_but_their_own(self):
        model = self.build()
        off = mtp_gradients(model, sampled_batch(), compute_mtp_loss=False)
        assert not any(gradient.any() for gradient in off.values())
        on = mtp_gradients(model, sampled_batch())
        assert all(gradient.any() for gradient in on.values())

    def test_a_normalizer_is_not_asked_for_when_the_heads_do_not_run(self):
        model, batch = self.build(mtp_loss_normalization="global"), sampled_batch()
        with torch.no_grad():
            assert model(**inputs(batch)).shape == (*batch.labels.shape, VOCABULARY)


@contextlib.contextmanager
def calls_of(model):
    """Count the calls of the model's own MTP block and output layer."""
    calls = dict(block=0, head=0)

    def count(name):
        def hook(_module, _args):
            calls[name] += 1

        return hook

    handles = [
        model.mtp.register_forward_pre_hook(count("block")),
        model.output_layer.register_forward_pre_hook(count("head")),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
