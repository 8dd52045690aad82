"""A tied pipeline stage with heads holds no output weight that nobody uses.

    python -m pytest tests/unit_tests/transformer/test_mtp_tied_stage.py
"""

import itertools

import pytest
import torch

from tests.support import ModelSpec, build_model, parallel_world, prepare, run_ranks
from tests.support import worst_difference
from tests.support.ddp_training import Trainer, Training, global_batch, microbatches
from tests.support.weights import whole_model_name

prepare()

from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)

FAMILIES = ["gpt", "hybrid"]
OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def spec_of(family, tied):
    return ModelSpec(
        family=family,
        tied=tied,
        hidden_size=16,
        num_attention_heads=2,
        dtype=torch.float32,
        overrides=dict(mtp_isolated_loss=True),
    )


def train(groups, family, tied, overlap, number):
    """Parameters after three steps, by their name in the undivided model."""
    trainer = Trainer(spec_of(family, tied), Training(overlap_grad_reduce=overlap), groups)
    for step in range(3):
        trainer.step(microbatches(global_batch(step), groups, number))
    model = trainer.model.module
    return {whole_model_name(n, model, groups): p for n, p in trainer.parameters().items()}


def two_stages():
    """Names of the parameters, keys of the checkpoint, and what training gives."""
    found = {}
    with parallel_world(pp=2) as groups:
        for family, tied in itertools.product(FAMILIES, (False, True)):
            model = build_model(spec_of(family, tied), groups)
            names = [name for name, _ in model.named_parameters()]
            keys = sharded_keys(model)
            trained = [train(groups, family, tied, overlap, 4) for overlap in (True, False)]
            found[family, tied] = names, keys, trained
    return found


def sharded_keys(model):
    """Keys of this stage's checkpoint, once all stages together are found to make a valid one.

    Valid: every part of every tensor is saved by exactly one rank.
    """
    local, everywhere = determine_global_metadata(model.sharded_state_dict())
    if torch.distributed.get_rank() == 0:
        validate_sharding_integrity(everywhere)
    return {tensor.key for tensor in local}


def one_stage():
    with parallel_world() as groups:
        cases = itertools.product(FAMILIES, (False, True))
        return {case: train(groups, *case, False, 4) for case in cases}


@pytest.fixture(scope="module")
def stages():
    return run_ranks(two_stages, 2)


@pytest.fixture(scope="module")
def whole():
    return run_ranks(one_stage, 1)[0]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_stage_has_an_output_weight_only_if_it_is_not_tied(stages, family, tied):
    names = stages[1][family, tied][0]
    assert EMBEDDING in names
    assert (OUTPUT in names) == (not tied)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_train_as_one_with_and_without_overlap(stages, whole, family, tied):
    seen = set()
    for rank in stages:
        overlapped, plain = rank[family, tied][2]
        assert all(torch.equal(overlapped[name], plain[name]) for name in plain)
        want = {name: whole[family, tied][name] for name in plain}
        assert worst_difference(plain, want) < (5e-4, "")
        seen |= set(plain)
    assert seen == set(whole[family, tied])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_stages_make_one_valid_distributed_checkpoint(stages, whole, family, tied):
    first, last = (rank[family, tied][1] for rank in stages)
    assert EMBEDDING in first & last
    assert (OUTPUT in last) == (not tied)


def gathered_on_rank():
    """Parameters of two stages with two replicas after steps with heads on, off, on."""
    with parallel_world(pp=2) as groups:
        return [
            switched(groups, Training(distributed_optimizer=True, overlap_param_gather=overlap))
            for overlap in (True, False)
        ]


def switched(groups, training):
    trainer = Trainer(spec_of("gpt", tied=True), training, groups)
    for step, on in enumerate((True, False, True)):
        trainer.step(microbatches(global_batch(step), groups), compute_mtp_loss=on)
    return trainer.parameters()


def test_a_tied_weight_is_gathered_for_the_output_layer_when_heads_are_skipped():
    for overlapped, plain in run_ranks(gathered_on_rank, 4):
        assert all(torch.equal(overlapped[name], plain[name]) for name in plain)
