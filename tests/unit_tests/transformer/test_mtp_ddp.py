"""Heads under DistributedDataParallel, its overlaps, both optimizers and clipping.

    python -m pytest tests/unit_tests/transformer/test_mtp_ddp.py
"""

import dataclasses
import itertools

import pytest
import torch

from tests.support import (
    ModelSpec,
    is_mtp_param,
    parallel_world,
    prepare,
    run_ranks,
    worst_difference,
)
from tests.support.claims import supports
from tests.support.ddp_training import (
    Trainer,
    Training,
    allocations_of,
    global_batch,
    is_policy,
    microbatches,
)

prepare()

WRAPPERS = {
    "adam": Training(overlap_grad_reduce=False),
    "adam, reduce overlapped": Training(),
    "distributed": Training(distributed_optimizer=True, overlap_grad_reduce=False),
    "distributed, reduce overlapped": Training(distributed_optimizer=True),
    "distributed, both overlapped": Training(distributed_optimizer=True, overlap_param_gather=True),
    "distributed, one bucket drains the next": Training(
        distributed_optimizer=True, ddp=dict(reduce_scatter_with_fp32_accumulation=True)
    ),
}
CLIPPED = ["adam, reduce overlapped", "distributed, reduce overlapped"]
TOGGLES = ["111", "101", "011", "110", "000"]  # heads on or off at each step


def spec_of(isolated=True, tied=False, **overrides):
    return ModelSpec(
        tied=tied,
        hidden_size=16,
        num_attention_heads=2,
        dtype=torch.float32,
        overrides=dict(mtp_isolated_loss=isolated, **overrides),
    )


def train(groups, spec, training, toggles="111", number=2):
    """Parameters after some steps, and the heads' largest gradient at every step."""
    trainer, largest = Trainer(spec, training, groups), []
    for step, on in enumerate(toggles):
        batch = microbatches(global_batch(step), groups, number)
        trainer.step(batch, compute_mtp_loss=on == "1")
        heads = [g for name, g in trainer.gradients().items() if is_mtp_param(name)]
        largest.append(max((g.abs().max().item() for g in heads), default=None))
    return trainer.parameters(), largest


def toggled_on_rank():
    with parallel_world() as groups:
        runs = itertools.product(WRAPPERS, TOGGLES)
        return {run: train(groups, spec_of(), WRAPPERS[run[0]], run[1]) for run in runs}


def staged_on_rank():
    """Two stages with two replicas; heads on the last, whose embedding gets no gradient."""
    with parallel_world(pp=2) as groups:
        runs = itertools.product(list(WRAPPERS)[:4], ["111", "101", "011"])
        return {run: train(groups, spec_of(), WRAPPERS[run[0]], run[1]) for run in runs}


def one_rank():
    with parallel_world() as groups:
        plain = WRAPPERS["adam"]
        return {t: train(groups, spec_of(), plain, t, number=4) for t in TOGGLES}


@pytest.fixture(scope="module")
def reference():
    return run_ranks(one_rank, 1)[0]


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(toggled_on_rank, 2)


@pytest.fixture(scope="module")
def stages():
    return run_ranks(staged_on_rank, 4, timeout=120.0)


@pytest.mark.parametrize("toggles", TOGGLES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_ranks_train_as_one_with_heads_switched_per_step(
    two_ranks, reference, wrapper, toggles
):
    for rank in two_ranks:
        parameters, largest = rank[wrapper, toggles]
        assert worst_difference(parameters, reference[toggles][0]) < (5e-4, "")
        assert [value > 0 for value in largest] == [on == "1" for on in toggles]


@supports(
    "Data parallel: DDP and optimizers, heads on (1) and off (0) per step",
    equal="plain Adam without overlap after three steps",
    ranks=2,
    dtype="float32",
)
@pytest.mark.parametrize("toggles", TOGGLES)
@pytest.mark.parametrize("wrapper", list(WRAPPERS)[1:])
def test_overlap_and_sharding_change_no_bit(two_ranks, wrapper, toggles):
    for rank in two_ranks:
        got, want = rank[wrapper, toggles][0], rank["adam", toggles][0]
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("toggles", ["111", "101", "011"])
@pytest.mark.parametrize("wrapper", list(WRAPPERS)[:4])
def test_a_later_stage_with_heads_trains_although_its_embedding_gets_no_gradient(
    stages, wrapper, toggles
):
    for rank in stages:
        got, want = rank[wrapper, toggles][0], rank["adam", toggles][0]
        assert all(torch.equal(got[name], want[name]) for name in want)
    first, last = stages[0][wrapper, toggles], stages[2][wrapper, toggles]
    name = "embedding.word_embeddings.weight"
    assert torch.equal(first[0][name], last[0][name])
    assert first[1] == [None] * 3
    assert [value > 0 for value in last[1]] == [on == "1" for on in toggles]


def clipped_on_rank():
    """Policies after three clipped steps: heads off, and with a huge objective."""
    found = {}
    with parallel_world() as groups:
        for wrapper, grouped in itertools.product(CLIPPED, (True, False)):
            for weight in (0.0, 0.1, 1e6):
                training = dataclasses.replace(WRAPPERS[wrapper], clip_grad=0.1)
                if not grouped:  # isolated by the call alone: no gradient-norm group
                    training = dataclasses.replace(training, forward=dict(mtp_isolated_loss=True))
                spec = spec_of(grouped, mtp_loss_scaling_factor=weight)
                trainer, norms = Trainer(spec, training, groups), []
                for step in range(3):
                    norms.append(trainer.step(microbatches(global_batch(step), groups)))
                policy = {n: p for n, p in trainer.parameters().items() if is_policy(n)}
                found[wrapper, grouped, weight] = norms, policy
    return found


def test_clipping_is_isolated_by_the_gradient_norm_group_of_the_heads():
    for rank in run_ranks(clipped_on_rank, 2):
        for wrapper in CLIPPED:
            norms, off = rank[wrapper, True, 0.0]
            assert min(norms) > 0.5  # clipped, by a factor of 5 or more
            for weight in (0.1, 1e6):
                got_norms, got = rank[wrapper, True, weight]
                assert got_norms == norms
                assert all(torch.equal(got[name], off[name]) for name in off)
            shared = rank[wrapper, False, 1e6][1]
            assert not all(torch.equal(shared[name], off[name]) for name in off)


def allocated_on_rank(vocabulary=1024, hidden=16):
    """Operations of a whole backward pass that allocate as much as an embedding, heads on, off."""
    spec = dataclasses.replace(spec_of(), vocab_size=vocabulary, hidden_size=hidden)
    found = {}
    with parallel_world(pp=2) as groups:
        trainer = Trainer(spec, WRAPPERS["adam, reduce overlapped"], groups)
        batch = microbatches(global_batch(0, rows=2, length=8), groups, number=2)
        for on in (True, False, True):
            with allocations_of(vocabulary * hidden) as operations:
                trainer.backward(batch, compute_mtp_loss=on)
            found.setdefault(on, []).append(operations)
    return found


def test_no_vocabulary_sized_temporary_stands_for_a_missing_gradient():
    first, last = run_ranks(allocated_on_rank, 2)
    # Per microbatch: the gradient of the embedding on the first stage, of the head on the last.
    assert [len(operations) for operations in first[True] + first[False]] == [2, 2, 2]
    assert last[True][0] == last[True][1] == last[False][0]
    assert [len(operations) for operations in last[True]] == [2, 2]
