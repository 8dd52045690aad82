"""How much each target weighs, against the formula written out in float64.

    python -m pytest tests/unit_tests/transformer/test_mtp_normalization.py
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support import bshd_batch, device, prepare, relative_error, thd_batch
from tests.support.objective import reference_objective

prepare()

from megatron.core.transformer.mtp_objective.normalization import require_normalizer
from megatron.core.transformer.multi_token_prediction import process_mtp_loss
from megatron.core.transformer.transformer_config import TransformerConfig



def batch_of(layout):
    """A batch with a float64 mask: counts take the mask's dtype, and so do quotients of them."""
    if layout == "bshd":
        batch = bshd_batch(batch=2, length=8, mask="prompt")
    else:
        batch = thd_batch((7, 3), (8, 4), mask="full")
    return dataclasses.replace(batch, loss_mask=batch.loss_mask.double())


def mtp_config(depths=2, **fields):
    values = dict(num_layers=1, hidden_size=4, num_attention_heads=1, mtp_loss_scaling_factor=0.3)
    return TransformerConfig(**{**values, "mtp_num_layers": depths, **fields})


class Head(torch.nn.Module):
    """Hidden states of the decoder and of every depth, and an output layer, as parameters."""

    def __init__(self, batch, depths, row):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        rows, length = batch.input_ids.shape
        weight = torch.randn((64, 4), generator=generator, dtype=torch.float64)
        shape = ((1 + depths) * length, 3, 4)
        hidden = torch.randn(shape, generator=generator, dtype=torch.float64)
        hidden = hidden[:, row : row + rows].contiguous()
        self.hidden = torch.nn.Parameter(hidden.to(device()))
        self.weight = torch.nn.Parameter(weight.to(device()))

    def logits(self, hidden, weight=None, runtime_gather_output=None):
        return F.linear(hidden, self.weight if weight is None else weight), None


def token_losses(labels, logits_SBV):
    return F.cross_entropy(logits_SBV.permute(1, 2, 0), labels, reduction="none")


def gradients(batch, config, normalizer=None, main_weight=0.0, row=0):
    """Gradients of all hidden states and of the output weight from one backward."""
    head = Head(batch, config.mtp_num_layers, row)
    out = process_mtp_loss(
        hidden_states=head.hidden,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        output_layer=head.logits,
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=token_losses,
        config=config,
        packed_seq_params=batch.packed_seq_params,
        mtp_loss_normalizer=normalizer,
    )
    (main_weight * out).sum().backward()
    return head.hidden.grad, head.weight.grad


def reference_gradients(batch, config, normalizer=None):
    head = Head(batch, config.mtp_num_layers, 0)
    depths = head.hidden.chunk(1 + config.mtp_num_layers)[1:]
    logits = [head.logits(hidden)[0] for hidden in depths]
    reference_objective(logits, batch, config, normalizer).backward()
    return head.hidden.grad, head.weight.grad


def assert_equal(got, want):
    for one, other in zip(got, want, strict=True):
        assert other.abs().max() > 0
        assert relative_error(one, other) <= 1e-12


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("depths", [1, 2, 3])
@pytest.mark.parametrize(
    "fields",
    [
        dict(calculate_per_token_loss=False),
        dict(calculate_per_token_loss=True),
        dict(calculate_per_token_loss=True, mtp_loss_normalization="global"),
    ],
    ids=["mean", "per-token", "global-per-token"],
)
def test_each_mode_weighs_targets_as_its_formula_says(fields, depths, layout):
    config = mtp_config(depths, **fields)
    batch = batch_of(layout)
    assert_equal(gradients(batch, config), reference_gradients(batch, config))


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "normalizer, denominators",
    [
        (5, [5, 5]),
        (0.25, [0.25, 0.25]),
        (torch.tensor(5), [5, 5]),
        (torch.tensor([5.0]), [5, 5]),
        (torch.tensor([5.0, 3.0], dtype=torch.float64), [5, 3]),
        (torch.tensor([4, 2], dtype=torch.int32), [4, 2]),
    ],
    ids=["int", "float", "scalar", "one", "per-depth", "per-depth-int"],
)
def test_a_normalizer_replaces_the_denominator(normalizer, denominators, per_token, layout):
    config = mtp_config(calculate_per_token_loss=per_token)
    batch = batch_of(layout)
    got = gradients(batch, config, normalizer)
    assert_equal(got, reference_gradients(batch, config, denominators))


@pytest.mark.parametrize(
    "fields",
    [
        dict(calculate_per_token_loss=True),
        dict(mtp_loss_normalization="global"),
        dict(calculate_per_token_loss=True, mtp_loss_normalization="global"),
    ],
)
def test_with_a_normalizer_nothing_but_the_targets_of_the_microbatch_matters(fields):
    batch = batch_of("bshd")
    want = gradients(batch, mtp_config(), 7.0)
    got = gradients(batch, mtp_config(**fields), 7.0)
    assert all(torch.equal(one, other) for one, other in zip(got, want))
    # The weight of the caller's own loss does not reach the objective (there is no schedule here
    # that would set the auxiliary scale): the caller's normalizer alone weighs it.
    alone = slice(batch.input_ids.size(1), None)
    got = gradients(batch, mtp_config(**fields), 7.0, main_weight=100.0)
    assert torch.equal(got[0][alone], want[0][alone]) and torch.equal(got[1], want[1])


def test_microbatches_with_one_normalizer_add_up_to_the_whole_batch():
    rows = [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]]
    whole = bshd_batch(3, 8, mask=rows)
    config, normalizer = mtp_config(), torch.tensor([10.0, 8.0])
    hidden, weight = gradients(whole, config, normalizer)
    parts = [gradients(row(whole, b), config, normalizer, row=b) for b in range(3)]
    got = torch.cat([part[0] for part in parts], dim=1), sum(part[1] for part in parts)
    assert_equal(got, (hidden, weight))


def test_without_a_normalizer_microbatches_of_unequal_size_do_not_add_up():
    whole = bshd_batch(2, 8, mask=[[1] * 8, [0] * 6 + [1] * 2])
    parts = [gradients(row(whole, b), mtp_config(), row=b)[1] for b in range(2)]
    assert relative_error(sum(parts) / 2, gradients(whole, mtp_config())[1]) > 0.1


def row(batch, b):
    fields = ("input_ids", "position_ids", "labels", "loss_mask")
    return dataclasses.replace(batch, **{n: getattr(batch, n)[b : b + 1] for n in fields})


@pytest.mark.parametrize(
    "normalizer, error, text",
    [
        (0, ValueError, "finite and greater than zero, got 0: pass a count"),
        (-1.5, ValueError, "finite and greater than zero, got -1.5: pass a count"),
        (math.nan, ValueError, "finite and greater than zero, got nan"),
        (math.inf, ValueError, "finite and greater than zero, got inf"),
        (torch.tensor([3.0, 0.0]), ValueError, r"greater than zero, got \[3.0, 0.0\]: pass a c"),
        (torch.tensor(-2), ValueError, "greater than zero, got -2"),
        (torch.tensor(math.nan), ValueError, "greater than zero, got nan"),
        (torch.tensor([1.0, math.inf]), ValueError, r"greater than zero, got \[1.0, inf\]"),
        (torch.ones(3), ValueError, r"one value or one per MTP depth \(2\), got shape \(3,\)"),
        (torch.ones(2, 1), ValueError, r"one per MTP depth \(2\), got shape \(2, 1\)"),
        (torch.ones(0), ValueError, r"one per MTP depth \(2\), got shape \(0,\)"),
        (torch.ones(2, dtype=torch.bool), TypeError, "real number or tensor, got torch.bool"),
        (torch.ones(2, dtype=torch.complex64), TypeError, "real number or .* torch.complex64"),
        (True, TypeError, "be a number or a tensor, got bool"),
        ("8", TypeError, "be a number or a tensor, got str"),
        ([8.0, 7.0], TypeError, "be a number or a tensor, got list"),
    ],
)
def test_a_bad_normalizer_is_refused(normalizer, error, text):
    with pytest.raises(error, match=f"^mtp_loss_normalizer must .*{text}"):
        require_normalizer(normalizer, mtp_config(2))


def test_numbers_of_numpy_are_numbers():
    require_normalizer(np.int64(3), mtp_config(2))
    require_normalizer(np.float32(2.5), mtp_config(2))


def test_a_normalizer_is_a_constant_of_the_objective():
    normalizer = torch.tensor([8.0, 7.0], requires_grad=True)
    hidden, _ = gradients(bshd_batch(), mtp_config(), normalizer)
    assert hidden.abs().sum() > 0 and normalizer.grad is None


def test_global_weighting_of_a_mean_needs_a_normalizer():
    config = mtp_config(mtp_loss_normalization="global")
    with pytest.raises(ValueError, match="needs mtp_loss_normalizer: pass the number of superv"):
        require_normalizer(None, config)
    require_normalizer(8, config)
    require_normalizer(None, mtp_config())
    per_token = mtp_config(mtp_loss_normalization="global", calculate_per_token_loss=True)
    require_normalizer(None, per_token)
