"""What forward promises with ``return_logits`` and external labels, for every model alike.

A test module makes the tests its own with::

    class TestGPTModel(ReturnLogitsContract, WrapperContract):
        family = "gpt"

Shape suffixes: B batch rows, S positions, V vocabulary, D depths (0: the decoder).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from tests.support.batches import Batch, bshd_batch
from tests.support.device import device
from tests.support.gradients import grads_by_name, worst_difference
from tests.support.models import ModelSpec, build_model, is_mtp_param
from tests.support.parallel import parallel_world
from tests.support.release import require_derived_targets
from tests.support.standin import fp64_cross_entropy

VOCABULARY = 64


class ModelContract:
    """A model family in a world of one rank."""

    family: Literal["gpt", "hybrid"]

    @pytest.fixture(scope="class", autouse=True)
    def world(self):
        """Megatron's groups, for all tests of a class."""
        with parallel_world() as groups:
            yield groups

    @pytest.fixture(autouse=True)
    def empty_tracker(self):
        """No metrics of an earlier forward."""
        tracker().clear()

    def build(self, **fields: Any) -> torch.nn.Module:
        """A model of the family; ``fields`` are those of ModelSpec, else config fields."""
        known = {field.name for field in dataclasses.fields(ModelSpec)}
        spec = {name: value for name, value in fields.items() if name in known}
        config = {name: value for name, value in fields.items() if name not in known}
        return build_model(ModelSpec(family=self.family, overrides=config, **spec))


class ReturnLogitsContract(ModelContract):
    """The table of what comes back and what MTP learns from, and isolation on top of it."""

    def test_without_labels_forward_returns_logits_and_mtp_learns_the_next_ids(self):
        require_derived_targets()
        model, batch = self.build(), sampled_batch()
        with fp64_cross_entropy():
            logits_BSV = model(**inputs(batch))
            (logits_BSV * 0).sum().backward()
        assert logits_BSV.shape == (*batch.input_ids.shape, VOCABULARY)
        got = grads_by_name(model)
        next_ids_BS = batch.input_ids.roll(-1, dims=1)
        known_BS = torch.ones_like(batch.loss_mask)
        known_BS[:, -1] = 0
        wanted = reference_gradients(model, batch, next_ids_BS, known_BS)
        assert worst_difference(got, wanted)[0] <= 1e-12

    def test_with_labels_forward_returns_the_token_losses_of_its_logits(self):
        model, batch = self.build(), sampled_batch()
        with fp64_cross_entropy():
            losses_BS = model(**batch.forward_kwargs())
        logits_BSV = model(**inputs(batch))
        want_BS = F.cross_entropy(logits_BSV.transpose(1, 2), batch.labels, reduction="none")
        assert losses_BS.shape == batch.labels.shape
        torch.testing.assert_close(losses_BS, want_BS, rtol=1e-12, atol=0)

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("with_mask", [False, True])
    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_returned_logits_are_bit_equal_to_those_without_labels(self, tied, with_mask, mode):
        model, batch = self.build(tied=tied).train(mode == "train"), sampled_batch()
        kwargs = batch.forward_kwargs()
        if not with_mask:
            kwargs["loss_mask"] = None
        got_BSV = model(**kwargs, return_logits=True)
        assert torch.equal(got_BSV, model(**inputs(batch)))
        assert torch.equal(got_BSV, model(**inputs(batch), return_logits=True))
        assert got_BSV.is_contiguous() and got_BSV.dtype == torch.float64

    @pytest.mark.parametrize("repeated", [False, True])
    @pytest.mark.parametrize("tied", [False, True])
    def test_mtp_learns_the_given_labels_and_not_the_shifted_ids(self, repeated, tied):
        """Against a plain reference: every gradient, of the model and of the heads."""
        model, batch = self.build(repeated=repeated, tied=tied), sampled_batch()
        got = mtp_gradients(model, batch)
        wanted = reference_gradients(model, batch, batch.labels, batch.loss_mask)
        assert worst_difference(got, wanted)[0] <= 1e-12
        from_ids = mtp_gradients(model, unlabelled(batch))
        assert all(not torch.equal(got[n], from_ids[n]) for n in got if is_mtp_param(n))

    @pytest.mark.parametrize("position, depths", [(0, []), (1, [1]), (2, [1, 2]), (7, [1, 2])])
    def test_a_changed_label_reaches_the_depths_that_are_scored_against_it(self, position, depths):
        """Depth k at t is scored against labels[t + k], so labels[0] is the decoder's alone."""
        model, batch = self.build(), bshd_batch(length=8)
        before = mtp_gradients(model, batch)
        labels_BS = batch.labels.clone()
        labels_BS[0, position] = 63
        after = mtp_gradients(model, dataclasses.replace(batch, labels=labels_BS))
        # A layer's closing norm learns from its own depth, what lies before it from later ones too.
        norms = {k: f"mtp.layers.{k - 1}.final_layernorm.weight" for k in (1, 2)}
        assert [k for k in (1, 2) if not torch.equal(before[norms[k]], after[norms[k]])] == depths

    @pytest.mark.parametrize("by_config", [False, True])
    @pytest.mark.parametrize("kind", ["distinct", "repeated", "tied"])
    def test_a_backward_from_zero_trains_isolated_mtp_and_leaves_the_rest_at_zero(
        self, by_config, kind
    ):
        overrides = dict(mtp_isolated_loss=True) if by_config else {}
        model = self.build(repeated=kind == "repeated", tied=kind == "tied", **overrides)
        call = {} if by_config else dict(mtp_isolated_loss=True)
        got = mtp_gradients(model, sampled_batch(), **call)
        assert {n for n, g in got.items() if g.any()} == {n for n in got if is_mtp_param(n)}

    def test_a_call_can_switch_isolation_of_the_config_off(self):
        model = self.build(mtp_isolated_loss=True)
        got = mtp_gradients(model, sampled_batch(), mtp_isolated_loss=False)
        assert all(gradient.any() for gradient in got.values())

    def test_isolated_mtp_leaves_the_policys_gradients_as_without_it(self):
        model, batch = self.build(), sampled_batch()
        weights_BSV = torch.randn(*batch.labels.shape, VOCABULARY, device=device())
        gradients = {}
        for on in (False, True):
            model.zero_grad(set_to_none=True)
            kwargs = dict(return_logits=True, mtp_isolated_loss=True, compute_mtp_loss=on)
            (model(**batch.forward_kwargs(), **kwargs) * weights_BSV).sum().backward()
            gradients[on] = grads_by_name(model)
        with_mtp, without = gradients[True], gradients[False]
        outside = [n for n in without if not is_mtp_param(n)]
        assert [n for n in outside if not torch.equal(with_mtp[n], without[n])] == []
        assert all(gradient.any() for gradient in with_mtp.values())

    def test_a_normalizer_replaces_the_count_of_targets(self):
        """Mean mode weighs by 1 / N_k, N_k = 16 for both depths here; with n = 64 a quarter."""
        model, batch = self.build(), sampled_batch()
        plain = mtp_gradients(model, batch)
        for normalizer in (64, 64.0, torch.tensor(64.0), torch.tensor([64, 64])):
            got = mtp_gradients(model, batch, mtp_loss_normalizer=normalizer)
            assert worst_difference({n: g * 4 for n, g in got.items()}, plain)[0] <= 1e-12


def sampled_batch() -> Batch:
    """Two rows whose labels are nobody's next id; the first half is prompt, 16 targets count."""
    batch = bshd_batch(batch=2, length=16, mask="prompt")
    return dataclasses.replace(batch, labels=(batch.input_ids * 3 + 5) % VOCABULARY)


def inputs(batch: Batch) -> dict[str, Any]:
    """Keyword arguments of a forward without labels and mask."""
    return batch.forward_kwargs() | dict(labels=None, loss_mask=None)


def unlabelled(batch: Batch) -> Batch:
    """The batch without its labels."""
    return dataclasses.replace(batch, labels=None)


def tracker() -> dict:
    """Upstream's logged metrics of this process."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    return MTPLossLoggingHelper.tracker


def mtp_gradients(model, batch: Batch, **options: Any) -> dict[str, torch.Tensor]:
    """Gradients of the MTP objective alone: the caller's own loss is the logits times zero."""
    model.zero_grad(set_to_none=True)
    with fp64_cross_entropy():
        logits_BSV = model(**batch.forward_kwargs(), return_logits=True, **options)
        (logits_BSV * 0).sum().backward()
    return grads_by_name(model)


def reference_gradients(model, batch: Batch, labels_BS, mask_BS) -> dict[str, torch.Tensor]:
    """The same, written out: f/D · Σ_k Σ_t mask[t+k] CE(head_k(t), labels[t+k]) / Σ_t mask[t+k]."""
    model.zero_grad(set_to_none=True)
    captured = []
    handle = model.mtp.register_forward_hook(lambda _module, _args, output: captured.append(output))
    model(**inputs(batch))
    handle.remove()
    depths = model.config.mtp_num_layers
    hidden_DSBH = captured[0].chunk(1 + depths)
    tied = model.share_embeddings_and_output_weights
    weight_VH = (model.embedding.word_embeddings if tied else model.output_layer).weight
    length = labels_BS.size(1)
    loss = 0.0
    for k in range(1, 1 + depths):
        logits_BVS = F.linear(hidden_DSBH[k], weight_VH).permute(1, 2, 0)[..., : length - k]
        token_losses_BS = F.cross_entropy(logits_BVS, labels_BS[:, k:], reduction="none")
        loss = loss + (token_losses_BS * mask_BS[:, k:]).sum() / mask_BS[:, k:].sum()
    (loss * model.config.mtp_loss_scaling_factor / depths).backward()
    return grads_by_name(model)
