"""Heads read the rows of ``decoder_input`` ahead of them, not the embeddings of placeholders.

    python -m pytest tests/unit_tests/transformer/test_mtp_given_embeddings.py
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
    relative_error,
    thd_batch,
    worst_difference,
)
from tests.support.claims import supports
from tests.support.objective import nonzero, step_gradients
from tests.support.rows import look_ahead
from tests.support.vision import EMBEDDING, PLACEHOLDER, given_rows, placeholders

prepare()

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.mtp_objective.plan import DepthInputs
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

FAMILIES = ("gpt", "hybrid")
LAYOUTS = {"bshd": bshd_batch(2, 8, "prompt"), "thd": thd_batch((7, 3), (8, 4))}
AXIS = "Given embeddings (vision-language batches)"
IMAGE = slice(2, 5)


@pytest.fixture(scope="module", autouse=True)
def groups():
    with parallel_world() as groups:
        yield groups


@pytest.fixture(autouse=True)
def no_metrics_of_other_models():
    MTPLossLoggingHelper.tracker.clear()


def embedded(model, batch):
    """What the model would embed itself, [s, b, h]."""
    return model.embedding(input_ids=batch.input_ids, position_ids=batch.position_ids)


def with_image(model, batch):
    """Ids with placeholders at an image, and text merged with its features, [s, b, h]."""
    ids = batch.input_ids.clone()
    ids[:, IMAGE] = PLACEHOLDER
    rows = model.embedding(input_ids=ids, position_ids=batch.position_ids)
    features = given_rows(batch, ModelSpec())[IMAGE]
    return ids, torch.cat([rows[: IMAGE.start], features, rows[IMAGE.stop :]]), features


MODELS = {
    "2 depths": {},
    "1 depth, full recompute": dict(mtp_num_layers=1, recompute="full"),
    "3 repeated depths, tied": dict(mtp_num_layers=3, repeated=True, tied=True),
    "isolated": dict(overrides=dict(mtp_isolated_loss=True)),
    "isolated, full recompute, chunked": dict(
        recompute="full", overrides=dict(mtp_isolated_loss=True, mtp_loss_chunk_size=3)
    ),
}


@supports(AXIS, equal="the same text passed as ids")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_text_embedded_outside_gives_the_bits_of_ids(kind, layout, family):
    model, batch = build_model(ModelSpec(family=family, **MODELS[kind])), LAYOUTS[layout]
    want = step_gradients(model, batch, 1.0)
    arguments = dict(decoder_input=embedded(model, batch), input_ids=placeholders(batch))
    got = step_gradients(model, batch, 1.0, **arguments)
    # Of the embedding the same numbers are added in another order.
    assert relative_error(got.pop(EMBEDDING), want.pop(EMBEDDING)) <= 1e-12
    assert worst_difference(got, want)[0] == 0.0
    calls = [{**batch.forward_kwargs(), **given} for given in ({}, arguments)]
    assert torch.equal(*(model(**call, return_logits=True) for call in calls))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_depth_reads_text_and_image_rows_of_the_tokens_ahead(layout, family):
    model, batch, read = build_model(ModelSpec(family=family)), LAYOUTS[layout], []
    for layer in model.mtp.layers:
        layer.enorm.register_forward_pre_hook(lambda _norm, given: read.append(given[0]))
    ids, rows_SBH, _ = with_image(model, batch)
    step_gradients(model, batch, input_ids=ids, decoder_input=rows_SBH)
    bounds = [(0, 8)] if layout == "bshd" else [(0, 7), (8, 3)]
    for depth, got in enumerate(read, start=1):
        numbers = look_ahead(range(1, rows_SBH.size(0) + 1), depth, bounds)
        want = [rows_SBH[n - 1] if n else torch.zeros_like(rows_SBH[0]) for n in numbers]
        assert torch.equal(got, torch.stack(want))
    assert len(read) == 2


def test_a_vision_tower_learns_from_the_heads_unless_they_are_isolated():
    model, batch = build_model(ModelSpec()), LAYOUTS["bshd"]
    tower = torch.nn.Linear(5, 32, dtype=torch.float64, device=batch.input_ids.device)
    patches = torch.ones(3, 2, 5, dtype=torch.float64, device=batch.input_ids.device)
    for isolated in (True, False):
        tower.zero_grad()
        rows_SBH = embedded(model, batch)
        rows_SBH = torch.cat([rows_SBH[:2], tower(patches), rows_SBH[5:]])
        got = step_gradients(model, batch, decoder_input=rows_SBH, mtp_isolated_loss=isolated)
        assert all(is_mtp_param(name) for name in nonzero(got)) == isolated
        assert (tower.weight.grad != 0).any() == (not isolated)
        assert tower.weight.grad.isfinite().all()


def test_learned_position_embeddings_are_those_of_the_tokens_ahead():
    model, batch = build_model(ModelSpec()), LAYOUTS["bshd"]
    model.embedding = LanguageModelEmbedding(
        model.config, 64, 128, "learned_absolute", tp_group=model.pg_collection.tp
    ).to(batch.input_ids.device, torch.float64)
    want = step_gradients(model, batch)
    given = dict(decoder_input=embedded(model, batch), input_ids=placeholders(batch))
    assert worst_difference(step_gradients(model, batch, **given), want)[0] <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_and_positions_need_not_be_there(layout, family):
    model, batch = build_model(ModelSpec(family=family)), LAYOUTS[layout]
    rows = given_rows(batch, ModelSpec())
    want = step_gradients(model, batch, decoder_input=rows)
    changes = [dict(input_ids=None), dict(input_ids=None, position_ids=None)]
    # Multimodal rotary embeddings take three positions per token.
    changes.append(dict(position_ids=batch.position_ids.expand(3, -1, -1)))
    for change in changes:
        got = step_gradients(model, batch, decoder_input=rows, **change)
        assert worst_difference(got, want)[0] == 0.0


def test_a_padding_mask_goes_with_rows_without_ids():
    overrides = dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1)
    overrides["moe_token_dispatcher_type"] = "alltoall"
    model, batch = build_model(ModelSpec(num_experts=4, overrides=overrides)), LAYOUTS["bshd"]
    given = dict(decoder_input=given_rows(batch, ModelSpec()))
    given["padding_mask"] = batch.position_ids >= 6
    want = step_gradients(model, batch, **given)
    assert worst_difference(step_gradients(model, batch, input_ids=None, **given), want)[0] == 0.0


REFUSED = {
    "rows of another length": (
        lambda rows: dict(decoder_input=rows[:6]),
        r"\[s, b, h\] = \(8, 2, 32\) for input_ids \(2, 8\) .* got \(6, 2, 32\)",
    ),
    "rows batch first": (
        lambda rows: dict(decoder_input=rows.transpose(0, 1), input_ids=None),
        r"for labels \(2, 8\) .* got \(2, 8, 32\)",
    ),
    "neither ids nor labels": (
        lambda rows: dict(decoder_input=rows, input_ids=None, labels=None, loss_mask=None),
        "without labels and without input_ids.*Pass labels",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", REFUSED)
def test_what_heads_cannot_read_is_refused(case, family):
    model, batch = build_model(ModelSpec(family=family)), LAYOUTS["bshd"]
    change, words = REFUSED[case]
    arguments = {**batch.forward_kwargs(), **change(given_rows(batch, ModelSpec()))}
    with pytest.raises(ValueError, match=words):
        model(**arguments)


def test_passes_without_heads_take_any_decoder_input():
    model, batch = build_model(ModelSpec()), LAYOUTS["bshd"]
    rows = given_rows(batch, ModelSpec())
    arguments = {**batch.forward_kwargs(), "decoder_input": rows, "input_ids": None, "labels": None}
    with torch.no_grad():
        want = model(**arguments)
    assert torch.equal(model(**arguments, compute_mtp_loss=False), want)


def test_a_layer_that_embeds_placeholders_all_the_same_is_refused():
    model, batch = build_model(ModelSpec()), LAYOUTS["bshd"]
    layer = model.mtp.layers[1]
    original = layer._get_embeddings

    def of_ids(mtp_inputs, **arguments):
        names = ("input_ids", "position_ids", "padding_mask")
        inputs = DepthInputs(*(getattr(mtp_inputs, name) for name in names))
        return original(mtp_inputs=inputs, **arguments)

    layer._get_embeddings = of_ids
    model(**batch.forward_kwargs())
    with pytest.raises(RuntimeError, match="depth 2 did not read it.*embed_ahead"):
        model(**batch.forward_kwargs(), decoder_input=given_rows(batch, ModelSpec()))
