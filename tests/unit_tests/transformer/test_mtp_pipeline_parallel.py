"""Heads on the last stage, on a stage of their own, interleaved: one rank's gradients.

    python -m pytest tests/unit_tests/transformer/test_mtp_pipeline_parallel.py
"""

import itertools

import pytest
import torch

from tests.support import prepare, worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero
from tests.support.split import Comparison, SplitCase, heads_of

prepare()

from megatron.core.transformer.transformer_config import TransformerConfig

# Two stages send to the same rank in both directions: they must not be batched (upstream's rule).
TWO_STAGES = dict(overlap_p2p_comm=True, batch_p2p_comm=False)
PLACES = {
    "PP=2, heads on the last stage": (2, {}),
    "PP=3, heads on a stage with layers, Et|tmm|L": (
        3,
        dict(pipeline_model_parallel_layout="Et|tmm|L"),
    ),
    "PP=3, heads alone on a stage, Ett|mm|L": (3, dict(pipeline_model_parallel_layout="Ett|mm|L")),
    "PP=2, heads on the first stage, Ettmm|L": (2, dict(pipeline_model_parallel_layout="Ettmm|L")),
    "PP=2, interleaved": (2, dict(virtual_pipeline_model_parallel_size=2, **TWO_STAGES)),
    "PP=2, interleaved, Et|t|t|tmmL": (
        2,
        dict(pipeline_model_parallel_layout="Et|t|t|tmmL", **TWO_STAGES),
    ),
    "PP=3, interleaved, heads alone on a stage, E|t|t|tt|mm|L": (
        3,
        dict(pipeline_model_parallel_layout="E|t|t|tt|mm|L"),
    ),
}
MODES = {
    "heads on": (1.0, {}, {}),
    "isolated": (0.0, dict(mtp_isolated_loss=True), {}),
    "heads off": (1.0, dict(mtp_isolated_loss=True), dict(compute_mtp_loss=False)),
    "logits": (1.0, dict(mtp_isolated_loss=True), dict(return_logits=True)),
}


OTHERS = {
    "PP=2, HybridModel, untied": SplitCase(dict(pp=2), dict(family="hybrid")),
    "PP=2, HybridModel, tied": SplitCase(dict(pp=2), dict(family="hybrid", tied=True)),
    "PP=2, full recompute, per-token, packed": SplitCase(
        dict(pp=2), dict(recompute="full", per_token=True), layout="thd"
    ),
    "PP=2 with CP=2": SplitCase(dict(pp=2, cp=2), main_weight=0.0),
    "PP=2, interleaved, messages neither batched nor overlapped": SplitCase(
        dict(pp=2),
        dict(num_layers=4),
        dict(virtual_pipeline_model_parallel_size=2, batch_p2p_comm=False),
    ),
    "PP=2 with DP=2, repeated heads": SplitCase(dict(pp=2, dp=2), dict(repeated=True)),
}
TIES = {"untied": False, "tied": True}


def _placed(place, tie, mode):
    pp, where = PLACES[place]
    weight, overrides, forward = MODES[mode]
    fields = dict(tied=TIES[tie], num_layers=4 if "interleaved" in place else 2)
    return SplitCase(dict(pp=pp), fields, {**where, **overrides}, "bshd", forward, weight)


PLACED = {key: _placed(*key) for key in itertools.product(PLACES, TIES, MODES)}
COMPARISON = Comparison({**PLACED, **OTHERS})


@supports("Pipeline parallel", agrees=1e-12, ranks="PP")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_those_of_one_rank_wherever_the_heads_are(place, tie, mode):
    got, want = COMPARISON.of((place, tie, mode))
    assert worst_difference(got, want)[0] <= 1e-12
    heads = set(heads_of(want))
    if mode == "isolated":
        assert nonzero(got) == heads
    else:
        assert nonzero(got) == (set(want) - heads if mode == "heads off" else set(want))


@supports("Pipeline parallel", agrees=1e-12, ranks="2 and 4")
@pytest.mark.parametrize("case", OTHERS)
def test_gradients_of_other_pipelines_are_those_of_one_rank(case):
    got, want = COMPARISON.of(case)
    assert worst_difference(got, want)[0] <= 1e-12
    assert nonzero(got) == set(want)


REFUSED = {
    "PP=2, interleaved, heads on the first rank, Et|t|ttmm|L": ("Et|t|ttmm|L", 2, 4),
    "PP=3, interleaved, heads on the first rank, Et|t|t|tmm||L": ("Et|t|t|tmm||L", 3, 4),
}


def _config(pp, layers, **fields):
    sizes = dict(num_layers=layers, hidden_size=16, num_attention_heads=4, mtp_num_layers=2)
    return TransformerConfig(
        **{**sizes, **fields}, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float64
    )


@supports(
    "Pipeline parallel",
    refused="pipeline_model_parallel_layout puts MTP layers on the first pipeline rank",
)
@pytest.mark.parametrize("layout", REFUSED)
def test_a_layout_that_would_hang_is_refused_when_the_config_is_made(layout):
    text, pp, layers = REFUSED[layout]
    fields = dict(pipeline_model_parallel_layout=text, **TWO_STAGES)
    with pytest.raises(ValueError, match="MTP layers on the first pipeline rank.*1 of 2.*hangs"):
        _config(pp, layers, **fields)


BATCHED = {
    "PP=2, interleaved, batch_p2p_comm": dict(virtual_pipeline_model_parallel_size=2),
    "PP=2, interleaved, Et|t|t|tmmL, batch_p2p_comm": dict(
        pipeline_model_parallel_layout="Et|t|t|tmmL"
    ),
}


@supports("Pipeline parallel", refused="MTP on 2 pipeline ranks")
@pytest.mark.parametrize("case", BATCHED)
def test_two_interleaved_stages_that_batch_their_messages_are_refused(case):
    """What the trainer's argument parser refuses for any model, and the config alone does not."""
    with pytest.raises(
        ValueError, match="MTP on 2 pipeline ranks with .*=2 needs batch_p2p_comm=False, got True"
    ):
        _config(2, 4, **BATCHED[case])
    _config(2, 4, **BATCHED[case], **TWO_STAGES)


def test_three_interleaved_stages_may_batch_their_messages():
    _config(3, 6, virtual_pipeline_model_parallel_size=2)


def test_a_model_without_heads_is_left_to_upstream():
    _config(2, 4, virtual_pipeline_model_parallel_size=2, mtp_num_layers=None)
