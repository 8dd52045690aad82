"""Gradients of a whole model against autograd through the objective written out in float64.

    python -m pytest tests/unit_tests/transformer/test_mtp_reference.py
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_model,
    fp64_cross_entropy,
    grads_by_name,
    is_mtp_param,
    parallel_world,
    prepare,
    thd_batch,
    worst_difference,
)
from tests.support.objective import nonzero, reference_objective, step_gradients
from tests.support.release import loss_key

prepare()

from megatron.core.transformer import multi_token_prediction

MODES = {
    "mean": {},
    "per-token": dict(calculate_per_token_loss=True),
    "global": dict(calculate_per_token_loss=True, mtp_loss_normalization="global"),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with parallel_world(), fp64_cross_entropy():
        yield


@pytest.fixture(autouse=True)
def tracker():
    """Upstream's metrics of this test alone: they are sized by the first model that writes them."""
    multi_token_prediction.MTPLossLoggingHelper.tracker.clear()
    return multi_token_prediction.MTPLossLoggingHelper.tracker


def batch_of(layout, mask="prompt"):
    """A batch with a float64 mask, so that quotients of counts are float64 too."""
    if layout == "bshd":
        batch = bshd_batch(batch=2, length=8, mask=mask)
    else:
        batch = thd_batch((7, 5), (8, 8), mask=mask)
    return dataclasses.replace(batch, loss_mask=batch.loss_mask.double())


def small_model(depths=2, mode="mean", **fields):
    spec = dict(num_layers=1, hidden_size=16, num_attention_heads=2, mtp_num_layers=depths)
    overrides = dict(MODES[mode], mtp_loss_scaling_factor=0.3)
    return build_model(ModelSpec(**{**spec, **fields}, overrides=overrides))


def both_gradients(model, batch):
    """Gradients of the model's own backward, and of the objective written out on its states."""
    states = []
    hook = model.mtp.register_forward_hook(lambda module, args, output: states.append(output))
    model.zero_grad(set_to_none=True)
    output = model(**batch.forward_kwargs())
    hook.remove()
    depths = states[0].chunk(1 + model.config.mtp_num_layers)[1:]
    weight = model.embedding.word_embeddings.weight
    if not model.share_embeddings_and_output_weights:
        weight = model.output_layer.weight
    objective = reference_objective([F.linear(h, weight) for h in depths], batch, model.config)
    names, parameters = zip(*model.named_parameters())
    wanted = torch.autograd.grad(objective, parameters, retain_graph=True, materialize_grads=True)
    (0 * output).sum().backward()
    return grads_by_name(model), dict(zip(names, wanted))


@pytest.mark.parametrize("repeated", [False, True], ids=["distinct", "repeated"])
@pytest.mark.parametrize("depths", [1, 2, 3])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_every_parameter_are_those_of_the_written_objective(
    mode, layout, depths, repeated
):
    model = small_model(depths, mode, repeated=repeated)
    got, want = both_gradients(model, batch_of(layout))
    assert {name for name in want if is_mtp_param(name)} <= nonzero(want)
    assert worst_difference(got, want) <= (1e-12, "~")


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_are_those_of_the_written_objective_in_every_family(family, tied):
    got, want = both_gradients(small_model(family=family, tied=tied), batch_of("thd"))
    assert "embedding.word_embeddings.weight" in nonzero(want)
    assert worst_difference(got, want) <= (1e-12, "~")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_an_empty_mask_gives_gradients_of_exactly_zero(layout, mode):
    gradients = step_gradients(small_model(mode=mode), batch_of(layout, mask="empty"))
    assert nonzero(gradients) == set()
    assert nonzero(step_gradients(small_model(mode=mode), batch_of(layout))) != set()


def test_an_empty_mask_logs_a_loss_of_zero(tracker):
    step_gradients(small_model(), batch_of("bshd", mask="empty"))
    assert tracker[loss_key()].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_labels_of_minus_100_train_as_masked_ones_do(layout):
    model, batch = small_model(), batch_of(layout)
    labels = batch.labels.masked_fill(batch.loss_mask == 0, -100)
    want = step_gradients(model, batch)
    got = step_gradients(model, batch, labels=labels, loss_mask=None)
    assert worst_difference(got, want) <= (1e-12, "~")
    everything = step_gradients(model, batch, loss_mask=None)
    assert worst_difference(everything, want) > (0.1, "")


def poisoned_gradients(model, batch):
    """Gradients when the last depth's states are NaN wherever its prediction does not count."""
    mask_SB1 = batch.loss_mask.T.unsqueeze(-1)
    depths = model.config.mtp_num_layers
    drops_SB1 = torch.cat([mask_SB1[depths:], torch.zeros_like(mask_SB1[:depths])]) == 0

    def poison(module, args, output):
        return output[0].masked_fill(drops_SB1, float("nan")), *output[1:]

    hook = model.mtp.layers[-1].register_forward_hook(poison)
    gradients = step_gradients(model, batch)
    hook.remove()
    return gradients


def test_a_non_finite_row_that_does_not_count_reaches_no_gradient():
    model, batch = small_model(), batch_of("bshd")
    want = step_gradients(model, batch)
    got = poisoned_gradients(model, batch)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert "output_layer.weight" in nonzero(want)


def test_without_the_guard_a_non_finite_row_reaches_the_output_layer(monkeypatch):
    monkeypatch.setattr(multi_token_prediction, "drop_unsupervised_rows", lambda rows, *_: rows)
    gradients = poisoned_gradients(small_model(), batch_of("bshd"))
    assert gradients["output_layer.weight"].isnan().any()


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda b: dict(labels=b.labels.float()), TypeError, "labels must hold token ids in an"),
        (lambda b: dict(labels=b.labels[:, 1:]), ValueError, "labels must have the shape of input"),
        (lambda b: dict(loss_mask=b.loss_mask[0]), ValueError, "loss_mask must have the shape of"),
        (lambda b: dict(loss_mask=[1, 1]), TypeError, "loss_mask must be a tensor, got list"),
    ],
    ids=["label-dtype", "label-shape", "mask-shape", "mask-type"],
)
def test_a_model_refuses_labels_and_masks_of_the_wrong_shape_or_dtype(change, error, text):
    batch = batch_of("bshd")
    with pytest.raises(error, match=text):
        step_gradients(small_model(), batch, **change(batch))
