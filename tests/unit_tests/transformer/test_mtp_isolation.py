"""The isolated objective trains every MTP parameter, and nothing else, to the bit.

Isolation for one call alone is in ``test_mtp_isolated_calls.py``.

    python -m pytest tests/unit_tests/transformer/test_mtp_isolation.py
"""

import collections
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_config,
    build_model,
    is_mtp_param,
    parallel_world,
    prepare,
    thd_batch,
)
from tests.support.attention import ReferenceAttention
from tests.support.objective import nonzero, step_gradients
from tests.support.release import release, require_derived_targets

prepare()

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

CASES = list(
    itertools.product(
        ["gpt", "hybrid"],
        [False, True],
        [1, 2],
        [False, True],
        ["none", "full", "selective"],
    )
)


@pytest.fixture(scope="module", autouse=True)
def groups():
    with parallel_world() as groups:
        yield groups


@pytest.fixture(autouse=True)
def no_metrics_of_other_models():
    MTPLossLoggingHelper.tracker.clear()


def spec_of(family="gpt", tied=False, depths=2, repeated=False, recompute="none", **overrides):
    return ModelSpec(
        family=family,
        tied=tied,
        mtp_num_layers=depths,
        repeated=repeated,
        recompute=recompute,
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        overrides=overrides,
    )


def isolated_model(*case, **fields):
    return build_model(spec_of(*case, mtp_isolated_loss=True, **fields))


def mtp_names(gradients):
    names = {name for name in gradients if is_mtp_param(name)}
    assert names
    return names


def batch_of(layout="bshd"):
    if layout == "bshd":
        return bshd_batch(batch=2, length=8)
    return thd_batch((7, 3), (8, 4))


@pytest.mark.parametrize("family, tied, depths, repeated, recompute", CASES)
def test_isolated_heads_train_themselves_and_nothing_else(
    family, tied, depths, repeated, recompute
):
    model = isolated_model(family, tied, depths, repeated, recompute)
    gradients = step_gradients(model, batch_of(), main_weight=0.0)
    assert nonzero(gradients) == mtp_names(gradients)
    assert all(gradient.isfinite().all() for gradient in gradients.values())

    # With the main loss too, all other gradients are those of a model that has no heads at all.
    gradients = step_gradients(model, batch_of(), main_weight=1.0)
    without = build_model(spec_of(family, tied, 0, recompute=recompute))
    want = step_gradients(without, batch_of(), main_weight=1.0)
    assert want.keys() == gradients.keys() - mtp_names(gradients)
    assert [name for name in want if not torch.equal(gradients[name], want[name])] == []
    assert nonzero(want) == set(want)


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_same_check_finds_the_leak_of_heads_that_are_not_isolated(family, tied):
    gradients = step_gradients(build_model(spec_of(family, tied)), batch_of())
    assert nonzero(gradients) == set(gradients)  # embedding, decoder, output layer: all of them


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_without_labels_isolated_heads_train_themselves_and_nothing_else(family, layout):
    # What an RL trainer calls today: logits only, with targets derived from the input.
    require_derived_targets()
    given = dict(labels=None, loss_mask=None)
    gradients = step_gradients(isolated_model(family), batch_of(layout), **given)
    assert nonzero(gradients) == mtp_names(gradients)
    leaking = step_gradients(build_model(spec_of(family)), batch_of(layout), **given)
    assert nonzero(leaking) == set(leaking)


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_packed_sequences_are_isolated_alike(family):
    gradients = step_gradients(isolated_model(family), batch_of("thd"))
    assert nonzero(gradients) == mtp_names(gradients)


def last_depth_alone(model, batch):
    """Gradients by name from the loss of the last depth only, and those of each depth's states."""
    blocks, states = [], []
    hooks = [model.mtp.register_forward_hook(lambda module, args, output: blocks.append(output))]
    hooks += [
        layer.register_forward_hook(lambda module, args, output: states.append(output[0]))
        for layer in model.mtp.layers
    ]
    model(**batch.forward_kwargs())
    for hook in hooks:
        hook.remove()
    logits_SBV = model.output_layer(
        blocks[0].chunk(1 + model.config.mtp_num_layers)[-1],
        weight=model.shared_embedding_or_output_weight().detach(),
    )[0]
    loss = F.cross_entropy(logits_SBV.flatten(0, 1), batch.labels.roll(-2, 1).T.flatten())
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad(
        loss, [*parameters, *states], allow_unused=True, materialize_grads=True
    )
    return dict(zip(names, gradients)), gradients[len(names) :]


@pytest.mark.parametrize("repeated", [False, True], ids=["distinct", "repeated"])
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_the_loss_of_depth_two_reaches_depth_one_and_stops_there(family, repeated):
    model = isolated_model(family, repeated=repeated)
    gradients, states = last_depth_alone(model, batch_of())
    assert nonzero(gradients) == mtp_names(gradients)
    assert len(states) == 2 and all((state != 0).any() for state in states)
    assert any("mtp.layers.0." in name for name in nonzero(gradients))


@pytest.mark.parametrize("isolated", [False, True], ids=["attached", "isolated"])
@pytest.mark.parametrize("repeated", [False, True], ids=["distinct", "repeated"])
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_recomputation_does_not_change_a_gradient(family, repeated, isolated):
    gradients = {
        recompute: step_gradients(
            build_model(spec_of(family, False, 2, repeated, recompute, mtp_isolated_loss=isolated)),
            batch_of(),
            main_weight=1.0,
        )
        for recompute in ("none", "full", "selective")
    }
    want = gradients["none"]
    for recompute in ("full", "selective"):
        got = gradients[recompute]
        assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.parametrize("recompute, times", [("none", 1), ("full", 2), ("selective", 2)])
def test_attention_of_every_layer_and_depth_runs_again_when_it_is_recomputed(
    family, recompute, times
):
    model = isolated_model(family, recompute=recompute)
    calls = collections.Counter()
    attentions = [m for m in model.modules() if isinstance(m, ReferenceAttention)]
    for attention in attentions:
        attention.register_forward_hook(lambda module, args, output: calls.update([module]))
    step_gradients(model, batch_of(), main_weight=1.0)
    assert len(calls) == len(attentions) == 4  # 2 decoder layers, 2 depths
    if (family, recompute) == ("hybrid", "full"):  # a hybrid head is checkpointed within itself
        # Up to 0.17 the decoder's stack does not recompute.
        assert min(calls.values()) == (times if release() >= (0, 18) else 1)
    else:
        assert set(calls.values()) == {times}


def test_block_recomputation_says_that_heads_are_not_recomputed_and_changes_no_gradient():
    fields = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        got = step_gradients(isolated_model(**fields), batch_of())
    said = [str(w.message) for w in caught if "Skipping recompute" in str(w.message)]
    assert len(said) == 1 and "not supported for MTP" in said[0]
    want = step_gradients(isolated_model(), batch_of())
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_isolated_heads_form_a_gradient_norm_group_of_their_own(family):
    model = isolated_model(family)
    assert model.config.mtp_detach_heads
    for name, parameter in model.named_parameters():
        group = getattr(parameter, "grad_norm_group", None)
        assert group == ("mtp" if is_mtp_param(name) else None), name


def test_without_the_field_nothing_is_detached():
    model = build_model(spec_of())
    assert not model.config.mtp_isolated_loss and not model.config.mtp_detach_heads
    assert not any(hasattr(p, "grad_norm_group") for p in model.parameters())


def test_a_config_changed_after_the_model_was_built_isolates_too():
    model = build_model(spec_of())
    model.config.mtp_isolated_loss = True
    gradients = step_gradients(model, batch_of(), main_weight=0.0)
    assert nonzero(gradients) == mtp_names(gradients)


def test_a_config_without_heads_refuses_to_isolate_them(groups):
    spec = spec_of(depths=0, mtp_isolated_loss=True)
    with pytest.raises(ValueError, match="mtp_num_layers is None: set mtp_num_layers or drop mtp"):
        build_config(spec, groups)
