"""A trainer's own weighting, turned into masks and normalizers over microbatches and ranks.

    python -m pytest tests/unit_tests/transformer/test_mtp_weighting.py
"""

import math

import pytest
import torch

from tests.support import (
    ModelSpec,
    all_reduce_gradients,
    build_model,
    device,
    fp64_cross_entropy,
    is_mtp_param,
    parallel_world,
    prepare,
    run_ranks,
    shard,
    worst_difference,
)
from tests.support.host_sync import HostSyncs
from tests.support.objective import nonzero, step_gradients
from tests.support.rows import packed_seq_params

prepare()

from megatron.core.transformer.mtp_objective import WEIGHTINGS, Targets, weigh_microbatches

DEPTHS, LENGTH = 2, 8
# Data-parallel rank × microbatch × row: weights of 8 predictions. One row has nothing to learn.
STEP = [
    [[[0, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]], [[1] * 8, [0] * 8]],
    [[[0, 0, 0.5, 0.5, 2, 0, 0, 0], [1, 0, 1, 0, 1, 0, 1, 0]], [[0, 1, 1, 0, 0, 1, 1, 0], [1] * 8]],
]
ROWS = [row for batches in STEP for batch in batches for row in batch]


def total(rows, depth):
    """Σ m_k of rows in plain arithmetic: what depth k sees is the row from its k-th place on."""
    return float(sum(sum(row[depth:]) for row in rows))


def plain(weighting, batch):
    """Mask and denominators of one microbatch in plain arithmetic."""
    depths = range(1, DEPTHS + 1)
    if weighting == "token-mean":
        return batch, [total(ROWS, k) for k in depths]
    if weighting == "microbatch-mean":
        return batch, [sum(map(len, STEP)) * total(batch, k) for k in depths]
    shares = [[weight / (sum(row) or 1) for weight in row] for row in batch]
    return shares, [float(sum(1 for row in ROWS if any(row)))] * DEPTHS


def microbatch(rank, number, cp=1, cp_rank=0):
    """Forward arguments of one microbatch, or of one context-parallel rank's part of it."""
    ids = (torch.arange(2 * LENGTH, device=device()).reshape(2, -1) * 3 + 7 * rank + number) % 64
    fields = {
        "input_ids": ids,
        "position_ids": torch.arange(LENGTH, device=device()).expand(2, -1),
        "labels": (ids * 5 + 1) % 64,
        "loss_mask": torch.tensor(STEP[rank][number], dtype=torch.float64, device=device()),
    }
    return {name: shard(value, cp, cp_rank) for name, value in fields.items()}


def heads_gradients(model, fields, mask, normalizer):
    gradients = step_gradients(
        model,
        None,
        **{**fields, "loss_mask": mask},
        attention_mask=None,
        mtp_loss_normalizer=normalizer,
        return_logits=True,
        mtp_isolated_loss=True,
    )
    return {name: g.clone() for name, g in gradients.items() if is_mtp_param(name)}


def model_of():
    return build_model(ModelSpec(num_layers=1, hidden_size=16, num_attention_heads=2))


def add(into, gradients):
    return {name: into.get(name, 0) + gradient for name, gradient in gradients.items()}


def on_four_ranks():
    """Per weighting: gradients of the step, summed over microbatches and ranks, and normalizers."""
    found = {}
    with parallel_world(cp=2) as groups, fp64_cross_entropy():
        model, rank = model_of(), groups.dp.rank()
        fields = [microbatch(rank, n, 2, groups.cp.rank()) for n in range(2)]
        for weighting in WEIGHTINGS:
            weighed = weigh_microbatches(
                [Targets(f["labels"], f["loss_mask"]) for f in fields],
                weighting,
                num_depths=DEPTHS,
                gradient_divisor=4.0,
                cp_group=groups.cp,
                dp_cp_group=groups.dp_cp,
            )
            summed = {}
            for one, each in zip(fields, weighed):
                given = each.loss_mask, each.mtp_loss_normalizer
                summed = add(summed, heads_gradients(model, one, *given))
            for name, parameter in model.named_parameters():
                parameter.grad = summed.get(name)
            all_reduce_gradients(model, groups.dp_cp, average=True)  # divides by 4
            gradients = {n: p.grad for n, p in model.named_parameters() if is_mtp_param(n)}
            found[weighting] = gradients, [each.mtp_loss_normalizer for each in weighed]
    return found


def test_gradients_of_dp_2_and_cp_2_are_those_of_each_target_weighed_by_hand():
    ranks = run_ranks(on_four_ranks, 4)
    for weighting in WEIGHTINGS:
        want = {}
        with parallel_world(), fp64_cross_entropy():
            model = model_of()
            for rank, batches in enumerate(STEP):
                for number, batch in enumerate(batches):
                    mask, denominators = plain(weighting, batch)
                    mask = torch.tensor(mask, dtype=torch.float64, device=device())
                    fields = microbatch(rank, number)
                    given = mask, torch.tensor(denominators)
                    want = add(want, heads_gradients(model, fields, *given))
        assert nonzero(want) == set(want)
        for found in ranks:
            assert worst_difference(found[weighting][0], want) <= (1e-12, "~"), weighting


def test_the_normalizers_of_one_rank_can_be_counted_by_hand():
    # Supervised at depth 1: 5 + 4 targets, then 7; at depth 2: 4 + 4, then 6. Three rows learn.
    fields = [microbatch(0, number) for number in range(2)]
    targets = [Targets(f["labels"], f["loss_mask"]) for f in fields]
    normalizers = {
        weighting: [
            weighed.mtp_loss_normalizer.tolist()
            for weighed in weigh_microbatches(targets, weighting, num_depths=DEPTHS)
        ]
        for weighting in WEIGHTINGS
    }
    assert normalizers == {
        "token-mean": [[16, 14]] * 2,
        "microbatch-mean": [[18, 16], [14, 12]],
        "sequence-mean": [[3, 3]] * 2,
    }


def test_the_weights_of_each_packed_sequence_add_up_to_one():
    # 10 11 12 _ | 20 21 _ _ | 30 with nothing to learn; what lies in the padding does not count.
    mask = torch.tensor([[1.0, 1, 1, 9, 0.5, 1.5, 9, 9, 0, 9, 9, 9]])
    labels = torch.ones_like(mask, dtype=torch.int64)
    params = packed_seq_params([0, 3, 5, 6], [0, 4, 8, 12])
    (weighed,) = weigh_microbatches(
        [Targets(labels, mask, params)], "sequence-mean", num_depths=DEPTHS
    )
    third = torch.tensor(1 / 3).item()
    assert weighed.loss_mask.tolist() == [[third] * 3 + [0, 0.25, 0.75] + [0] * 6]
    assert weighed.mtp_loss_normalizer.tolist() == [2.0, 2.0]


def test_ignored_labels_weigh_nothing_and_a_missing_mask_takes_all_others():
    labels = torch.tensor([[11, 12, -100, 14]])
    for mask in (None, torch.ones(1, 4)):
        (weighed,) = weigh_microbatches([Targets(labels, mask)], "token-mean", num_depths=1)
        assert weighed.loss_mask.tolist() == [[1, 1, 0, 1]]
        assert weighed.mtp_loss_normalizer.tolist() == [2.0]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_step_without_targets_has_a_normalizer_that_forward_takes(weighting):
    labels = torch.full((1, 4), -100)
    (weighed,) = weigh_microbatches([Targets(labels)], weighting, num_depths=2)
    assert not weighed.loss_mask.any()
    assert (weighed.mtp_loss_normalizer >= 1).all()


@pytest.mark.parametrize(
    "microbatches, weighting, divisor, text",
    [
        (1, "mean", 1.0, "weighting must be one of token-mean, sequence-mean, .* got 'mean'"),
        (0, "token-mean", 1.0, "at least one microbatch, got 0"),
        (1, "token-mean", 0.0, "gradient_divisor must be finite and greater than zero, got 0.0"),
        (1, "token-mean", math.inf, "gradient_divisor must be finite .* got inf"),
        (1, "token-mean", math.nan, "gradient_divisor must be finite .* got nan"),
    ],
)
def test_what_cannot_be_weighed_is_refused(microbatches, weighting, divisor, text):
    batches = [Targets(torch.ones(1, 4, dtype=torch.int64))] * microbatches
    with pytest.raises(ValueError, match=text):
        weigh_microbatches(batches, weighting, num_depths=1, gradient_divisor=divisor)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weighing_makes_the_host_wait_for_nothing(weighting):
    labels = torch.arange(LENGTH, device=device()).view(1, -1)
    with HostSyncs() as syncs:
        weigh_microbatches([Targets(labels)] * 3, weighting, num_depths=DEPTHS)
    assert syncs.names == []
