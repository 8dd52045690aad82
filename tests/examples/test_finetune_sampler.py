"""Samples of the fine-tuning example: their targets, and which rank sees which one when.

    pytest tests/examples/test_finetune_sampler.py
"""

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st

from tests.support import parallel_world, prepare, run_ranks

prepare()

from examples.finetune_mtp_head.batch import Batch
from examples.finetune_mtp_head.conversations import Sample
from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.sampler import Sampler, SeenSamples


def row(length: int, answer_from: int) -> Sample:
    """Tokens 10, 11, …, of which the assistant wrote those from ``answer_from`` on."""
    return Sample(torch.arange(10, 10 + length), torch.arange(length) >= answer_from, "here")


def test_targets_are_the_assistants_tokens_two_ahead_and_never_wrap_or_leave_the_row():
    batch = Batch.of([row(4, 2), row(6, 3)], pad_token=0)
    assert batch.tokens_BS.tolist() == [[10, 11, 12, 13, 0, 0], [10, 11, 12, 13, 14, 15]]
    mask_BS = batch.targets.masks_DBS[0]
    assert mask_BS.tolist() == [[1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
    labels = batch.targets.labels_DBS[0][mask_BS.bool()]
    assert labels.tolist() == [12, 13, 13, 14, 15]
    assert batch.num_targets == 5


def test_a_microbatch_without_samples_has_no_targets():
    batch = Batch.of([], pad_token=7)
    assert batch.num_targets == 0 and batch.tokens_BS.unique().tolist() == [7]


@hypothesis_settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    micro=st.integers(1, 5),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 5),
)
def test_each_epoch_gives_each_sample_to_one_rank_once(samples, batch_size, micro, ranks, seed):
    samplers = [Sampler(samples, batch_size, micro, rank, ranks, seed) for rank in range(ranks)]
    per_epoch = samplers[0].steps_per_epoch
    for epoch in range(2):
        seen = []
        for step in range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1):
            parts = [sampler.microbatches(step) for sampler in samplers]
            assert len({len(of_rank) for of_rank in parts}) == 1  # equally many forwards
            given_out = [s for of_rank in parts for part in of_rank for s in part]
            assert sorted(given_out) == sorted(samplers[0].batch(step))
            assert all(len(part) <= micro for of_rank in parts for part in of_rank)
            assert samplers[0].ends_epoch(step) == (step == (epoch + 1) * per_epoch)
            seen += given_out
        assert sorted(seen) == list(range(samples))


def test_epochs_differ_in_their_order_and_a_step_can_be_asked_for_at_any_time():
    sampler = Sampler(20, 20, 4, 0, 1, seed=1)
    first, second = sampler.batch(1), sampler.batch(2)
    assert first != second and sampler.batch(1) == first
    assert Sampler(20, 20, 4, 0, 1, seed=2).batch(1) != first


def count(missed: int | None, doubled: int | None, copies: int) -> str:
    """On a rank: count ten samples spread over the ranks, with a fault on the last one."""
    with parallel_world() as groups:
        seen = SeenSamples(10, copies, groups.dp)
        rank, ranks = groups.dp.rank(), groups.dp.size()
        mine = range(10) if copies > 1 else range(rank, 10, ranks)
        for sample in mine:
            if sample != missed:
                seen.add([sample])
        if doubled is not None and rank == ranks - 1:
            seen.add([doubled])
        try:
            seen.finish_epoch()
        except FinetuneError as error:
            return str(error)
        return "" if not seen.total().any() else "counts were kept"


@pytest.mark.parametrize("copies", [1, 2], ids=["different samples", "same samples"])
def test_the_count_over_ranks_notices_a_sample_missed_or_seen_twice(copies):
    assert run_ranks(count, 2, None, None, copies) == ["", ""]
    for error in run_ranks(count, 2, 7, None, copies):
        assert "1 were missed (first 7), 0 came too often" in error
    for error in run_ranks(count, 2, None, 4, copies):
        assert "0 were missed (first none), 1 came too often (first 4)" in error
