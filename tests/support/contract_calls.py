"""How the arguments of forward travel, and what it says to bad ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.support.contract import ModelContract, inputs, mtp_gradients, sampled_batch, tracker
from tests.support.gradients import grads_by_name, worst_difference
from tests.support.models import is_mtp_param
from tests.support.release import require_derived_targets

# what is wrong: (value, error, a part of the message)
BAD_NORMALIZERS: dict[str, tuple[Any, type, str]] = {
    "zero": (0, ValueError, "must be finite and greater than zero, got 0"),
    "negative": (-2.5, ValueError, "must be finite and greater than zero, got -2.5"),
    "infinite": (float("inf"), ValueError, "must be finite and greater than zero, got inf"),
    "not a number": (float("nan"), ValueError, "must be finite and greater than zero, got nan"),
    "zero for one depth": (torch.tensor([3.0, 0.0]), ValueError, r"got \[3.0, 0.0\]"),
    "too many values": (torch.ones(3), ValueError, r"one per MTP depth \(2\), got shape \(3,\)"),
    "a matrix": (torch.ones(2, 1), ValueError, r"one per MTP depth \(2\), got shape \(2, 1\)"),
    "complex": (torch.ones(1, dtype=torch.complex64), TypeError, "real number or tensor"),
    "a mask": (torch.ones(1, dtype=torch.bool), TypeError, "real number or tensor, got torch.bool"),
    "a word": ("16", TypeError, "must be a number or a tensor, got str"),
    "a truth value": (True, TypeError, "must be a number or a tensor, got bool"),
}

# what is wrong: (forward arguments, error, a part of the message); the batch is [2, 16]
BAD_TARGETS: dict[str, tuple[dict[str, Any], type, str]] = {
    "labels too short": (
        dict(labels=torch.zeros(2, 8, dtype=torch.int64)),
        ValueError,
        r"labels must have the shape of input_ids, \(2, 16\), got \(2, 8\)",
    ),
    "labels without rows": (
        dict(labels=torch.zeros(32, dtype=torch.int64)),
        ValueError,
        r"labels must have the shape of input_ids, \(2, 16\), got \(32,\)",
    ),
    "labels as probabilities": (
        dict(labels=torch.zeros(2, 16)),
        TypeError,
        r"labels must hold token ids in an integer dtype, got torch.float32; convert with .long",
    ),
    "labels as truth values": (
        dict(labels=torch.zeros(2, 16, dtype=torch.bool)),
        TypeError,
        "labels must hold token ids in an integer dtype, got torch.bool",
    ),
    "labels as a list": (
        dict(labels=[[0] * 16] * 2),
        TypeError,
        "labels must be an integer tensor, got list",
    ),
    "mask too short": (
        dict(loss_mask=torch.ones(2, 15)),
        ValueError,
        r"loss_mask must have the shape of labels, \(2, 16\), got \(2, 15\)",
    ),
    "mask of one row": (
        dict(loss_mask=torch.ones(16)),
        ValueError,
        r"loss_mask must have the shape of labels, \(2, 16\), got \(16,\)",
    ),
    "complex mask": (
        dict(loss_mask=torch.ones(2, 16, dtype=torch.complex64)),
        TypeError,
        "loss_mask must be bool, integer or floating point, got torch.complex64",
    ),
    "mask as a list": (
        dict(loss_mask=[[1] * 16] * 2),
        TypeError,
        "loss_mask must be a tensor, got list",
    ),
    "mask without labels": (
        dict(labels=None, loss_mask=torch.ones(2, 17)),
        ValueError,
        r"loss_mask must have the shape of input_ids, \(2, 16\), got \(2, 17\)",
    ),
}


class CallContract(ModelContract):
    """Wrappers and errors."""

    @pytest.mark.parametrize("reason", BAD_NORMALIZERS)
    def test_a_bad_normalizer_is_refused(self, reason):
        normalizer, error, message = BAD_NORMALIZERS[reason]
        model, batch = self.build(), sampled_batch()
        with pytest.raises(error, match=message):
            model(**batch.forward_kwargs(), return_logits=True, mtp_loss_normalizer=normalizer)
        assert tracker() == {}

    def test_global_normalization_in_mean_mode_asks_for_a_normalizer(self):
        model, batch = self.build(mtp_loss_normalization="global"), sampled_batch()
        with pytest.raises(ValueError, match="needs mtp_loss_normalizer: pass the number of super"):
            model(**batch.forward_kwargs(), return_logits=True)
        assert mtp_gradients(model, batch, mtp_loss_normalizer=16)
        self.build(mtp_loss_normalization="global", per_token=True)(**batch.forward_kwargs())

    @pytest.mark.parametrize("reason", BAD_TARGETS)
    def test_bad_labels_and_masks_are_refused(self, reason):
        if reason == "mask without labels":
            require_derived_targets()
        changes, error, message = BAD_TARGETS[reason]
        model, batch = self.build(), sampled_batch()
        with pytest.raises(error, match=message):
            model(**batch.forward_kwargs() | changes, return_logits=True)
        assert tracker() == {}

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float64])
    def test_a_mask_of_any_real_dtype_means_the_same(self, dtype):
        model, batch = self.build(), sampled_batch()
        wanted = mtp_gradients(model, batch)
        other = dataclasses.replace(batch, loss_mask=batch.loss_mask.to(dtype))
        assert worst_difference(mtp_gradients(model, other), wanted)[0] <= 1e-12

    @pytest.mark.parametrize("options", [{}, dict(mtp_isolated_loss=True, mtp_loss_normalizer=7.0)])
    def test_arguments_travel_through_float16_module(self, options):
        from megatron.core.transformer.module import Float16Module

        model, batch = self.build(dtype=torch.bfloat16), sampled_batch()
        wrapped = Float16Module(model.config, model)
        wanted_BSV = model(**inputs(batch))
        wanted = mtp_gradients(model, batch, **options)
        got_BSV = wrapped(**batch.forward_kwargs(), return_logits=True, **options)
        assert got_BSV.dtype == torch.float32
        assert torch.equal(got_BSV, wanted_BSV.float())
        model.zero_grad(set_to_none=True)
        (got_BSV * 0).sum().backward()
        assert _same(grads_by_name(model), wanted)
        with pytest.raises(ValueError, match="greater than zero"):
            wrapped(**batch.forward_kwargs(), mtp_loss_normalizer=0)

    def test_a_normalizer_above_256_keeps_its_value_in_a_bf16_model(self):
        """257 is no bf16 number: the wrapper must not round it."""
        from megatron.core.transformer.module import Float16Module

        model, batch = self.build(dtype=torch.bfloat16), sampled_batch()
        wrapped, seen = Float16Module(model.config, model), []
        model.register_forward_pre_hook(
            lambda _module, _args, kwargs: seen.append(kwargs["mtp_loss_normalizer"]),
            with_kwargs=True,
        )
        wrapped(**batch.forward_kwargs(), mtp_loss_normalizer=torch.tensor([257.0]))
        assert seen[0].item() == 257.0

    @pytest.mark.parametrize("isolated", [False, True])
    def test_arguments_travel_through_distributed_data_parallel(self, isolated):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        batch, options = sampled_batch(), dict(return_logits=True, mtp_isolated_loss=isolated)
        plain = self.build(dtype=torch.float32)
        wanted_BSV = plain(**batch.forward_kwargs(), **options)
        (wanted_BSV * 0).sum().backward()
        model = self.build(dtype=torch.float32)
        wrapped = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(overlap_grad_reduce=False), model
        )
        got_BSV = wrapped(**batch.forward_kwargs(), **options)
        assert torch.equal(got_BSV, wanted_BSV)
        (got_BSV * 0).sum().backward()
        wrapped.finish_grad_sync()
        got = grads_by_name(model)
        assert _same(got, grads_by_name(plain))
        trained = {name for name, gradient in got.items() if gradient.any()}
        assert trained == (set(filter(is_mtp_param, got)) if isolated else set(got))


def _same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(torch.equal(got[n], wanted[n]) for n in got)
