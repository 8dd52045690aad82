"""A critic has no output layer over the vocabulary, and therefore no heads to train.

    python -m pytest tests/unit_tests/transformer/test_mtp_critics.py
"""

import pytest
import torch

from tests.support import ModelSpec, bshd_batch, build_model, device, parallel_world, prepare
from tests.support import run_ranks
from tests.support.claims import supports
from tests.support.objective import step_gradients
from tests.support.pipeline import build_stages, world_options
from tests.support.release import derives_targets

prepare()

from megatron.core.transformer.mtp_objective.vocabulary_head import require_vocabulary_head
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

FAMILIES = ("gpt", "hybrid")
SP = dict(sequence_parallel=True)
SPLITS = {
    "TP=2": (dict(tp=2), {}),
    "TP=2 SP": (dict(tp=2), SP),
    "PP=2": (dict(pp=2), {}),
    "PP=2, heads with the embedding, Ettmm|L": (
        dict(pp=2),
        dict(pipeline_model_parallel_layout="Ettmm|L"),
    ),
}


class ValueHead(torch.nn.Linear):
    """One number per token, with the call of an output layer."""

    def __init__(self, hidden_size):
        super().__init__(hidden_size, 1, bias=False, dtype=torch.float64, device=device())

    def forward(self, hidden_states, weight=None, runtime_gather_output=None):
        return super().forward(hidden_states), None


class Adapter(torch.nn.Module):
    """A wrapper around an output layer, without a weight of its own."""

    def __init__(self, wrapped):
        super().__init__()
        self.to_wrap = wrapped

    def forward(self, *args, **kwargs):
        return self.to_wrap(*args, **kwargs)


HEADS = {
    "one output": (ValueHead, "ValueHead with 1 output"),
    "one output behind layers": (
        lambda hidden: torch.nn.Sequential(torch.nn.Linear(hidden, 8), torch.nn.Linear(8, 1)),
        "Sequential with 1 output",
    ),
    "hidden states": (lambda hidden: torch.nn.Identity(), "Identity, which has no weight"),
    "no output layer": (lambda hidden: None, "no output layer"),
}


@pytest.fixture(autouse=True)
def no_metrics_of_other_models():
    MTPLossLoggingHelper.tracker.clear()


@pytest.fixture
def world():
    with parallel_world() as groups:
        yield groups


@supports("Critics", refused="MTP heads share an output layer over the vocabulary")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS)
def test_a_model_without_a_vocabulary_head(world, head, family, tied):
    make, words = HEADS[head]
    model = build_model(ModelSpec(family=family, tied=tied))
    require_vocabulary_head(model)
    model.output_layer = make(32)
    labelled = bshd_batch(2, 8).forward_kwargs()
    calls = [labelled]
    if derives_targets():
        calls.append({**labelled, "labels": None, "loss_mask": None})
    for check in (
        lambda: require_vocabulary_head(model),
        *(lambda call=call: model(**call) for call in calls),
    ):
        with pytest.raises(ValueError, match=f"\\(64 tokens\\), but this model has {words}"):
            check()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_without_heads_computes_values(world, family):
    batch = bshd_batch(2, 8)
    call = {**batch.forward_kwargs(), "labels": None, "loss_mask": None}
    critic = build_model(ModelSpec(family=family, mtp_num_layers=0))
    critic.output_layer = ValueHead(32)
    require_vocabulary_head(critic)
    values = critic(**call)
    assert values.shape == (2, 8, 1)
    values.sum().backward()
    with_heads = build_model(ModelSpec(family=family))
    with_heads.output_layer = critic.output_layer
    assert torch.equal(with_heads(**call, compute_mtp_loss=False), values)
    with torch.no_grad():
        assert torch.equal(with_heads(**call), values)
    if not derives_targets():
        assert torch.equal(with_heads(**call), values)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrapped_vocabulary_head_trains_its_heads(world, family, tied):
    model, batch = build_model(ModelSpec(family=family, tied=tied)), bshd_batch(2, 8)
    want = step_gradients(model, batch, 1.0)
    model.output_layer = Adapter(model.output_layer)
    got = step_gradients(model, batch, 1.0)
    assert {name.replace("to_wrap.", "") for name in got} == set(want)
    for name, gradient in got.items():
        assert torch.equal(gradient, want[name.replace("to_wrap.", "")])


def _found(sizes, overrides, family, tied):
    """What the check says on this rank before and after the head is replaced."""
    spec = ModelSpec(family=family, tied=tied, overrides=overrides)
    options = world_options(spec, sizes.get("pp", 1))
    with parallel_world(**sizes, **options) as groups:
        (stage,) = build_stages(spec, groups)
        require_vocabulary_head(stage)
        if not stage.post_process:
            return "passes"
        stage.output_layer = ValueHead(32)
        with pytest.raises(ValueError) as refused:
            require_vocabulary_head(stage)
        return str(refused.value)


def _check(split, family, tied):
    sizes, overrides = SPLITS[split]
    for rank, text in enumerate(run_ranks(_found, 2, sizes, overrides, family, tied)):
        if "pp" in sizes and rank == 0:
            assert text == "passes"
        else:
            assert "ValueHead with 1 output" in text and "mtp_num_layers=None" in text


@supports("Critics", refused="MTP heads share an output layer over the vocabulary", ranks=2)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", ["TP=2", "TP=2 SP", "PP=2"])
def test_a_split_model_whose_output_layer_was_replaced(split, family, tied):
    """Every stage and shard of a policy passes; the stages with a value head do not."""
    _check(split, family, tied)


@supports("Critics", refused="MTP heads share an output layer over the vocabulary", ranks=2)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("split", ["PP=2, heads with the embedding, Ettmm|L"])
def test_a_value_head_on_another_stage_than_the_heads(split, tied):
    _check(split, "gpt", tied)
