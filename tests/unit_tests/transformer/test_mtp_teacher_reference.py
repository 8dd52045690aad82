"""Gradients of whole models against autograd through the objectives written out in float64.

    python -m pytest tests/unit_tests/transformer/test_mtp_teacher_reference.py
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
from tests.support.divergence import reference_teacher_objective
from tests.support.objective import nonzero
from tests.support.release import require_derived_targets

prepare()

from megatron.core.transformer.mtp_objective.metrics import mtp_metrics
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

TEACHER = dict(mtp_teacher_temperature=0.7, mtp_teacher_top_k=20, mtp_teacher_top_p=0.9)
SMALL = dict(num_layers=1, hidden_size=16, num_attention_heads=2)
OBJECTIVES = {
    "kl": dict(mtp_objective="kl"),
    "tv": dict(mtp_objective="tv"),
    "ce+kl": dict(mtp_objective="ce+kl", mtp_objective_weight=0.3),
    "ce+tv": dict(mtp_objective="ce+tv", mtp_objective_weight=2.0),
}
CHAINED = dict(mtp_depth_weighting="chained")
WEIGHTED = dict(mtp_depth_weights=[0.5, 2.0])


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with parallel_world(), fp64_cross_entropy():
        yield


@pytest.fixture(autouse=True)
def empty_tracker():
    MTPLossLoggingHelper.tracker.clear()


def batch_of(layout, mask="prompt"):
    """A batch with a float64 mask, so that quotients of counts are float64 too."""
    if layout == "bshd":
        batch = bshd_batch(batch=2, length=8, mask=mask)
    else:
        batch = thd_batch((7, 5), (8, 8), mask=mask)
    return dataclasses.replace(batch, loss_mask=batch.loss_mask.double())


def model_of(depths=2, chunk=0, overrides=(), **fields):
    overrides = dict(overrides, mtp_loss_scaling_factor=0.3, mtp_loss_chunk_size=chunk)
    fields = {**SMALL, "mtp_num_layers": depths, **fields}
    return build_model(ModelSpec(**fields, overrides=overrides))


def both_gradients(model, batch):
    """Gradients of the model's own backward and of the written objective, and the latter's a."""
    states, depths = [], model.config.mtp_num_layers
    hook = model.mtp.register_forward_hook(lambda module, args, output: states.append(output))
    model.zero_grad(set_to_none=True)
    output = model(**batch.forward_kwargs())
    hook.remove()
    main, *heads = states[0].chunk(1 + depths)
    weight = model.embedding.word_embeddings.weight
    if not model.share_embeddings_and_output_weights:
        weight = model.output_layer.weight
    head_weight = weight.detach() if model.config.mtp_isolated_loss else weight
    objective, accepted = reference_teacher_objective(
        [F.linear(h, head_weight) for h in heads], F.linear(main, weight), batch, model.config
    )
    names, parameters = zip(*model.named_parameters())
    wanted = torch.autograd.grad(
        objective, parameters, retain_graph=True, materialize_grads=True, allow_unused=True
    )
    (0 * output).sum().backward()
    return grads_by_name(model), dict(zip(names, wanted)), accepted


@pytest.mark.parametrize("chunk", [0, 3], ids=["one chunk", "chunks of 3"])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("isolated", [False, True], ids=["shared", "isolated"])
def test_gradients_of_every_parameter_are_those_of_the_written_objective(
    isolated, objective, layout, chunk
):
    fields = dict(OBJECTIVES[objective], **TEACHER, mtp_isolated_loss=isolated)
    got, want, _ = both_gradients(model_of(chunk=chunk, overrides=fields), batch_of(layout))
    heads = {name for name in want if is_mtp_param(name)}
    assert heads <= nonzero(want)
    assert worst_difference(got, want) <= (1e-12, "~")
    if isolated:
        assert nonzero(got) == heads
    else:
        assert "output_layer.weight" in nonzero(got)


WEIGHINGS = {
    "chained": CHAINED,
    "weighted": WEIGHTED,
    "chained and weighted": {**CHAINED, **WEIGHTED},
    "only the second": dict(mtp_depth_weights=[0.0, 1.0]),
    # The first is scored all the same: the chain needs its acceptance.
    "only the second, chained": dict(CHAINED, mtp_depth_weights=[0.0, 1.0]),
}


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.parametrize("objective", ["ce", "tv"])
@pytest.mark.parametrize("weighing", WEIGHINGS)
def test_weights_of_depths_multiply_their_part(weighing, objective, family):
    fields = dict(WEIGHINGS[weighing], mtp_objective=objective)
    got, want, _ = both_gradients(model_of(overrides=fields, family=family), batch_of("bshd"))
    assert nonzero(want) == nonzero(got)
    assert worst_difference(got, want) <= (1e-12, "~")


def test_weights_of_depths_also_weigh_the_cross_entropy_of_whole_logits_and_of_chunks():
    for chunk in (0, 3):
        model = model_of(chunk=chunk, overrides=dict(mtp_depth_weights=[0.0, 2.0]))
        got, want, _ = both_gradients(model, batch_of("thd"))
        assert worst_difference(got, want) <= (1e-12, "~")
        assert all(loss > 0 for loss in mtp_metrics(model).losses)


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("depths", [1, 3])
def test_every_family_learns_the_written_objective(depths, tied, family):
    fields = dict(OBJECTIVES["ce+kl"], **TEACHER, **CHAINED)
    model = model_of(depths, overrides=fields, family=family, tied=tied)
    got, want, _ = both_gradients(model, batch_of("thd"))
    assert "embedding.word_embeddings.weight" in nonzero(want)
    assert worst_difference(got, want) <= (1e-12, "~")


@pytest.mark.parametrize("objective", ["ce", "kl", "tv"])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_expected_acceptance_is_that_of_the_definition(layout, objective):
    fields = dict(TEACHER, mtp_objective=objective, mtp_expected_acceptance=True)
    model, batch = model_of(overrides=fields), batch_of(layout)
    *_, accepted = both_gradients(model, batch)
    metrics = mtp_metrics(model)
    for depth, accepted_BS in enumerate(accepted):
        count = metrics.supervised_tokens[depth]
        assert count == (accepted_BS != 0).sum()
        want = accepted_BS.sum().item() / count
        assert metrics.expected_acceptance[depth] == pytest.approx(want, rel=1e-12)
    counts_BS = batch.loss_mask.bool() & (accepted[0] != 0) & (accepted[1] != 0)
    lengths = 1 + accepted[0] + accepted[0] * accepted[1]
    assert counts_BS.sum() == metrics.accepted_length_positions > 0
    want = lengths[counts_BS].mean().item()
    assert metrics.expected_accepted_length == pytest.approx(want, rel=1e-12)
    named = metrics.as_dict()
    assert named["mtp_expected_accepted_length"] == metrics.expected_accepted_length
    assert named["mtp_2_expected_acceptance"] == metrics.expected_acceptance[1]
    assert not any("expected" in name for name in mtp_metrics(model).as_dict())  # started anew


def test_measuring_does_not_change_what_the_cross_entropy_trains():
    batch, found = batch_of("bshd"), []
    for measure in (False, True):
        model = model_of(chunk=3, overrides=dict(mtp_expected_acceptance=measure))
        found.append(both_gradients(model, batch)[0])
        named = mtp_metrics(model).as_dict()
        assert any("expected" in name for name in named) == measure
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_derived_labels_train_as_given_ones_that_say_the_same():
    """Without labels upstream's rule takes the next id, and its mask moves along."""
    require_derived_targets()
    batch, found = batch_of("bshd"), []
    mask_BS = batch.loss_mask.clone()
    mask_BS[:, -1] = 0  # what follows the last id is known to the labels alone
    derived = dict(labels=None, loss_mask=mask_BS.roll(1, dims=1))
    for given in (dict(loss_mask=mask_BS), derived):
        model = model_of(overrides={**OBJECTIVES["kl"], **TEACHER})
        kwargs = {**batch.forward_kwargs(), **given}
        model.zero_grad(set_to_none=True)
        (0 * model(**kwargs, return_logits=True)).sum().backward()
        found.append(grads_by_name(model))
    assert worst_difference(*found) <= (1e-12, "~")


def test_an_empty_mask_gives_gradients_of_exactly_zero_and_no_expectation():
    for objective in OBJECTIVES.values():
        model = model_of(overrides={**objective, **CHAINED})
        output = model(**batch_of("bshd", "empty").forward_kwargs())
        (0 * output).sum().backward()
        assert nonzero(grads_by_name(model)) == set()
        assert not any("expected" in name for name in mtp_metrics(model).as_dict())
