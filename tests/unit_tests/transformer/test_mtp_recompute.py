"""Recomputed activations change no bit of a gradient, dropout or not, isolated or not.

    python -m pytest tests/unit_tests/transformer/test_mtp_recompute.py

The case C18 of the known faults names recompute that changes gradients. None was found to: in the
release below the series the four cases without ``mlp`` are bit-equal as well, so they cannot be
shown failing there and only guard what holds. ``mlp`` recurses there without end.
"""

import functools
import warnings

import pytest
import torch

from tests.support import ModelSpec, bshd_batch, build_model, parallel_world, prepare
from tests.support import seed_everything, worst_difference
from tests.support.claims import supports
from tests.support.objective import nonzero, step_gradients
from tests.support.split import heads_of

prepare()

from megatron.core.tensor_parallel.random import checkpoint, model_parallel_cuda_manual_seed

FULL = dict(recompute_granularity="full", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective")
RECOMPUTE = {
    "full, uniform": dict(FULL, recompute_method="uniform"),
    "full, block": dict(FULL, recompute_method="block"),
    "selective, core_attn": dict(SELECTIVE, recompute_modules=["core_attn"]),
    "selective, layernorm": dict(SELECTIVE, recompute_modules=["layernorm"]),
    "selective, mlp with biases": dict(SELECTIVE, recompute_modules=["mlp"]),
}


@pytest.fixture(scope="module", autouse=True)
def groups():
    with parallel_world() as groups:
        yield groups


def handed_through():
    """A checkpointed function of a weight that returns a bias untouched; no backward yet."""
    weight, bias = (torch.nn.Parameter(torch.tensor([value])) for value in (3.0, 5.0))
    row = torch.ones(1, requires_grad=True)
    return weight, bias, checkpoint(lambda row: (row * weight, bias), False, row)


def gradients(family, dropout, isolated, recompute, steps=1):
    spec = ModelSpec(
        family=family,
        hidden_size=16,
        overrides=dict(
            recompute,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            mtp_isolated_loss=isolated,
        ),
    )
    model = build_model(spec)
    seed_everything(5)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    for _ in range(steps):
        found = step_gradients(model, bshd_batch(2, 8), 0.0 if isolated else 1.0)
    return found


reference = functools.cache(functools.partial(gradients, recompute={}))


@supports("Recompute", equal="no recompute")
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("isolated", [False, True], ids=["attached", "isolated"])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout 0.1"])
@pytest.mark.parametrize("family", ["gpt", "hybrid"])
@pytest.mark.filterwarnings("ignore:recompute_method")
def test_gradients_are_those_without_recompute(family, dropout, isolated, recompute):
    assert handed_through()[1].is_leaf  # or "mlp" would recurse until memory is gone
    got = gradients(family, dropout, isolated, RECOMPUTE[recompute])
    want = reference(family, dropout, isolated)
    assert worst_difference(got, want)[0] == 0.0
    assert nonzero(got) == set(heads_of(want) if isolated else want)


def test_heads_that_block_recompute_leaves_out_are_mentioned_once_not_once_per_step():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        gradients("gpt", 0.0, False, RECOMPUTE["full, block"], steps=3)
    said = [str(warning.message) for warning in caught if "recompute_method" in str(warning.message)]
    assert len(said) == 1 and "not supported for MTP" in said[0]


def test_a_parameter_handed_through_a_checkpoint_stays_one():
    """As the bias of an ``mlp``. In the release below the series it gets the checkpoint as its own
    history: recomputing it then recomputes without end."""
    weight, bias, outputs = handed_through()
    assert bias.is_leaf  # before backward, which would not end
    (outputs[0] + 2 * outputs[1]).backward()
    assert (weight.grad.item(), bias.grad.item()) == (1.0, 2.0)
