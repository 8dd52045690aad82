"""Fine-tuning of an MTP head: the step's loss and gradient, however samples and experts are spread.

    pytest tests/examples/test_finetune_training.py

Ranks are forked and run on the CPU; about 20 seconds on one core.
"""

import functools
import math

import pytest

from tests.support import prepare, relative_error, run_ranks

prepare()

from tests.examples.finetune_support import (
    gradients_of_first_step,
    reference_of_first_step,
    settings,
    whole_epoch,
)

SPLITS = {  # name: ranks, settings
    "EP 1, two data ranks": (2, dict()),
    "EP 2": (2, dict(expert_parallel_size=2)),
    "EP 4": (4, dict(expert_parallel_size=4)),
    "EP 2, two data-parallel copies": (4, dict(expert_parallel_size=2)),
    "EP 2, same batch": (2, dict(expert_parallel_size=2, same_batch_per_ep_group=True)),
    "EP 2 of 4 ranks, same batch": (4, dict(expert_parallel_size=2, same_batch_per_ep_group=True)),
}
by_split = pytest.mark.parametrize("split", SPLITS)


@functools.cache
def epoch_on_one_rank() -> list[dict]:
    return run_ranks(whole_epoch, 1, settings())[0]


@functools.cache
def reference():
    return run_ranks(reference_of_first_step, 1, settings())[0]


def worst_error(gradients: dict, wanted: dict) -> float:
    """Largest error of a gradient, relative to the largest element of the reference's."""
    assert gradients.keys() <= wanted.keys()
    errors = []
    for name, gradient in gradients.items():
        if wanted[name] is None:  # an expert that no supervised token was routed to
            assert not gradient.any(), name
        else:
            errors.append(relative_error(gradient, wanted[name]))
    return max(errors)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_the_gradient_is_that_of_one_full_batch_however_it_is_accumulated(micro_batch_size):
    given = settings(micro_batch_size=micro_batch_size)
    wanted, _ = reference()
    [gradients] = run_ranks(gradients_of_first_step, 1, given)
    assert gradients.keys() == wanted.keys()
    assert worst_error(gradients, wanted) < 2e-6


@by_split
def test_the_gradient_is_that_of_one_rank_however_samples_and_experts_are_spread(split):
    ranks, options = SPLITS[split]
    wanted, _ = reference()
    found = run_ranks(gradients_of_first_step, ranks, settings(**options))
    for gradients in found:
        assert worst_error(gradients, wanted) < 2e-6
    assert set().union(*found) == wanted.keys()  # together the ranks hold every expert


def test_the_loss_is_the_mean_that_cross_entropy_gives_when_recomputed():
    _, wanted = reference()
    assert epoch_on_one_rank()[0]["loss"] == pytest.approx(wanted, rel=1e-7)


@by_split
def test_an_epoch_goes_the_same_way_however_samples_and_experts_are_spread(split):
    ranks, options = SPLITS[split]
    found = run_ranks(whole_epoch, ranks, settings(**options))
    one = epoch_on_one_rank()
    for records in found:  # every rank reports the same
        for ours, theirs in zip(records, one, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            for name in ("lr", "targets", "samples"):
                assert ours[name] == theirs[name]
        for name in ("loss", "grad_norm"):
            assert records[0][name] == pytest.approx(one[0][name], rel=5e-7)
    assert one[-1]["loss"] < one[0]["loss"]


def test_the_learning_rate_rises_and_then_falls_along_a_cosine():
    rates = [record["lr"] for record in epoch_on_one_rank()]
    peak, low = 1e-2, 1e-3
    cosine = [low + (peak - low) * (1 + math.cos(math.pi * k / 3)) / 2 for k in (1, 2)]
    assert rates == pytest.approx([peak / 2, peak, *cosine, low])


def test_an_epochs_steps_see_every_sample():
    assert [record["samples"] for record in epoch_on_one_rank()] == [8, 8, 8, 8, 4]
