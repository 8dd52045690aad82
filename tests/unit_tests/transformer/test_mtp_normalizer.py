"""``mtp_loss_normalizer`` of the forward pass: the caller decides how much a target weighs.

    python -m pytest tests/unit_tests/transformer/test_mtp_normalizer.py
"""

import dataclasses

import pytest
import torch

from tests.support import (
    ModelSpec,
    all_reduce_gradients,
    bshd_batch,
    build_model,
    device,
    fp64_cross_entropy,
    grads_by_name,
    is_mtp_param,
    parallel_world,
    prepare,
    run_ranks,
    worst_difference,
)
from tests.support.objective import nonzero, step_gradients

prepare()

MASKS = [[1, 1, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]]
TARGETS = [8.0, 6.0]  # per depth: 1 + 7, 0 + 6


def small_model(mtp_isolated_loss=True, **overrides):
    overrides.update(mtp_isolated_loss=mtp_isolated_loss, mtp_loss_scaling_factor=0.3)
    spec = ModelSpec(num_layers=1, hidden_size=16, num_attention_heads=2, overrides=overrides)
    return build_model(spec)


def batch_of(rows=slice(None)):
    batch = bshd_batch(2, 8, mask=MASKS)
    fields = ("input_ids", "position_ids", "labels", "loss_mask")
    return dataclasses.replace(batch, **{name: getattr(batch, name)[rows] for name in fields})


def rl_step(model, batch, main_weight, **forward):
    return step_gradients(model, batch, main_weight, return_logits=True, **forward)


def heads(gradients):
    return {name: gradient for name, gradient in gradients.items() if is_mtp_param(name)}


@pytest.fixture
def one_rank():
    with parallel_world(), fp64_cross_entropy():
        yield


@pytest.mark.parametrize("as_given", [float, torch.tensor, lambda n: torch.tensor([n, n])])
def test_gradients_of_the_heads_are_divided_by_the_normalizer(one_rank, as_given):
    model, batch = small_model(), batch_of()
    one = rl_step(model, batch, 0.0, mtp_loss_normalizer=1)
    four = rl_step(model, batch, 0.0, mtp_loss_normalizer=as_given(4.0))
    assert {name for name in one if is_mtp_param(name)} == nonzero(one)
    assert all(torch.equal(four[name] * 4, one[name]) for name in one)


def test_the_number_of_targets_of_each_depth_as_normalizer_is_the_mean(one_rank):
    model, batch = small_model(), batch_of()
    want = rl_step(model, batch, 0.0)
    got = rl_step(model, batch, 0.0, mtp_loss_normalizer=torch.tensor(TARGETS))
    assert worst_difference(heads(got), heads(want)) <= (1e-12, "~")


def test_the_weight_of_the_callers_loss_does_not_reach_the_heads(one_rank):
    # A trainer without Megatron's schedules never sets the auxiliary scale: it stays 1.
    model, batch = small_model(), batch_of()
    want = heads(rl_step(model, batch, 0.0, mtp_loss_normalizer=8.0))
    for main_weight in (1.0, -1000.0):
        got = heads(rl_step(model, batch, main_weight, mtp_loss_normalizer=8.0))
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_with_a_normalizer_the_configured_weighting_does_not_matter(one_rank):
    batch = batch_of()
    gradients = [
        rl_step(small_model(**fields), batch, 0.0, mtp_loss_normalizer=8.0)
        for fields in (
            {},
            dict(calculate_per_token_loss=True),
            dict(mtp_loss_normalization="global"),
            dict(calculate_per_token_loss=True, mtp_loss_normalization="global"),
        )
    ]
    for other in gradients[1:]:
        assert all(torch.equal(other[name], gradients[0][name]) for name in other)


@pytest.mark.parametrize("isolated", [True, False])
def test_microbatches_with_one_normalizer_add_up_to_the_whole_batch(one_rank, isolated):
    model = small_model(isolated)
    normalizer = torch.tensor(TARGETS, device=device())
    whole = rl_step(model, batch_of(), 0.0, mtp_loss_normalizer=normalizer)
    first, second = (
        rl_step(model, batch_of(slice(row, row + 1)), 0.0, mtp_loss_normalizer=normalizer)
        for row in (0, 1)
    )
    added = {name: first[name] + second[name] for name in whole}
    assert worst_difference(added, whole) <= (1e-12, "~")


def data_parallel_gradients(per_token):
    """Reduced gradients of two ranks with one row each, 9 labels and 8 + 6 targets in all."""
    with parallel_world() as groups, fp64_cross_entropy():
        model = small_model(calculate_per_token_loss=per_token)
        rank = groups.dp.rank()
        reduction = 9 if per_token else groups.dp.size()
        normalizer = torch.tensor(TARGETS, device=device()) / reduction
        batch = batch_of(slice(rank, rank + 1))
        rl_step(model, batch, 0.0, mtp_loss_normalizer=normalizer)
        all_reduce_gradients(model, groups.dp, average=not per_token)
        return {n: g / (9 if per_token else 1) for n, g in grads_by_name(model).items()}


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per-token"])
def test_unequal_data_parallel_ranks_give_the_mean_over_all_targets(per_token):
    with parallel_world(), fp64_cross_entropy():
        want = heads(rl_step(small_model(), batch_of(), 0.0))
    # A float32 normalizer times 9 is off by 1e-7; of the mean it is exact.
    tolerance = 1e-6 if per_token else 1e-12
    for rank in run_ranks(data_parallel_gradients, 2, per_token):
        assert worst_difference(heads(rank), want) <= (tolerance, "~")


@pytest.mark.parametrize(
    "normalizer, error, text",
    [
        (0, ValueError, "finite and greater than zero, got 0: pass a count of targets"),
        (torch.ones(3), ValueError, r"one value or one per MTP depth \(2\), got shape \(3,\)"),
        (True, TypeError, "must be a number or a tensor, got bool"),
        ("8", TypeError, "must be a number or a tensor, got str"),
    ],
)
def test_forward_refuses_a_bad_normalizer(one_rank, normalizer, error, text):
    with pytest.raises(error, match=text):
        rl_step(small_model(), batch_of(), 0.0, mtp_loss_normalizer=normalizer)


def test_forward_asks_for_a_normalizer_only_where_the_objective_runs(one_rank):
    model, batch = small_model(mtp_loss_normalization="global"), batch_of()
    with pytest.raises(ValueError, match="needs mtp_loss_normalizer: pass the number of superv"):
        rl_step(model, batch, 0.0)
    rl_step(model, batch, 0.0, mtp_loss_normalizer=8)
    rl_step(model, batch, 0.0, compute_mtp_loss=False)
    with torch.no_grad():
        model(**batch.forward_kwargs(), return_logits=True)
