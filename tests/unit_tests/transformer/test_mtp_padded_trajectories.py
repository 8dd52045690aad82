"""Trajectories as padded rows: the same targets as packed ones, whole and split over ranks.

    python -m pytest tests/unit_tests/transformer/test_mtp_padded_trajectories.py
"""

import random

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.support import (
    ModelSpec,
    build_model,
    device,
    fp64_cross_entropy,
    is_mtp_param,
    parallel_world,
    prepare,
    shard,
    worst_difference,
)
from tests.support.objective import nonzero, step_gradients

prepare()

from megatron.core.transformer.mtp_objective import (
    IGNORED_LABEL,
    pack_trajectories,
    pad_trajectories,
)

NONE = IGNORED_LABEL
FIELDS = ("tokens", "position_ids", "labels", "loss_mask", "padding_mask")


def tensors(values, dtype=torch.int64):
    return [torch.tensor(v, dtype=dtype, device=device()) for v in values]


def test_each_trajectory_gets_a_row_padded_to_the_longest():
    tokens = tensors([[10, 11, 12, 13, 14], [20, 21], [30]])
    sampled = tensors([[0, 0, 1, 1, 1], [0, 1], [1]])
    batch = pad_trajectories(tokens, sampled, pad_to_multiple=3, pad_token=63)
    assert batch.tokens.tolist() == [
        [10, 11, 12, 13, 14, 63],
        [20, 21, 63, 63, 63, 63],
        [30, 63, 63, 63, 63, 63],
    ]
    assert batch.labels.tolist() == [
        [11, 12, 13, 14, NONE, NONE],
        [21, NONE, NONE, NONE, NONE, NONE],
        [NONE] * 6,
    ]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert batch.position_ids.tolist() == [list(range(6))] * 3
    assert [row.count(False) for row in batch.padding_mask.tolist()] == [5, 2, 1]
    assert batch.padding_mask[1].tolist() == [False] * 2 + [True] * 4


def test_a_trajectory_without_padding_behind_it_has_no_label_past_its_end():
    batch = pad_trajectories(tensors([[10, 11], [20, 21]]), tensors([[1, 1]] * 2))
    assert batch.labels.tolist() == [[11, NONE], [21, NONE]]
    assert batch.loss_mask.tolist() == [[1, 0], [1, 0]]


@hypothesis.given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    cp=st.sampled_from([1, 2, 4]),
    multiple=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_padded_and_packed_batches_hold_the_same_targets_on_all_ranks(lengths, cp, multiple, seed):
    draw = random.Random(seed)
    trajectories = [[draw.randint(1, 99) for _ in range(length)] for length in lengths]
    weights = [[draw.choice([0.0, 0.25, 1.0]) for _ in range(length)] for length in lengths]
    given = tensors(trajectories), tensors(weights, torch.float32)
    alone = {"pad_to_multiple": multiple if cp == 1 else multiple * 2 * cp}
    whole, packed = pad_trajectories(*given, **alone), pack_trajectories(*given)
    starts = packed.packed_seq_params.cu_seqlens_q.tolist()
    for row, (start, length) in enumerate(zip(starts, lengths)):
        for name in ("tokens", "position_ids", "labels", "loss_mask"):
            want = getattr(packed, name)[0, start : start + length]
            assert torch.equal(getattr(whole, name)[row, :length], want), name
        assert (whole.labels[row, length:] == NONE).all()
        assert not whole.loss_mask[row, length:].any()
    for rank in range(cp):
        part = pad_trajectories(*given, cp_size=cp, cp_rank=rank, **alone)
        for name in FIELDS:
            assert torch.equal(getattr(part, name), shard(getattr(whole, name), cp, rank)), name


@pytest.mark.parametrize(
    "tokens, masks, options, text",
    [
        ([], [], {}, "at least one trajectory"),
        (tensors([[1, 2]]), tensors([[1]]), {}, r"token_masks\[0\] must have the shape"),
        (tensors([[1, 2]]), tensors([[1, 1]]), {"cp_rank": 2, "cp_size": 2}, r"in \[0, 2\), got 2"),
    ],
)
def test_what_cannot_be_padded_is_refused_as_by_packing(tokens, masks, options, text):
    for build in (pad_trajectories, pack_trajectories):
        with pytest.raises(ValueError, match=text):
            build(tokens, masks, **options)


def test_heads_train_on_padded_rows_as_on_packed_ones():
    tokens = tensors([[10, 11, 12, 13, 14, 15, 16], [20, 21, 22], [30, 31, 32, 33, 34]])
    masks = tensors(
        [[0, 0, 1.0, 1.0, 0.5, 1.0, 1.0], [0, 2.0, 2.0], [0, 1.0, 0, 1.0, 1.0]], torch.float64
    )
    common = {"return_logits": True, "mtp_isolated_loss": True, "mtp_loss_normalizer": 8.0}
    with parallel_world(), fp64_cross_entropy():
        model = build_model(ModelSpec(num_layers=1, hidden_size=16, num_attention_heads=2))

        def gradients(batch, **more):
            names = {"tokens": "input_ids"}
            fields = {n: getattr(batch, n) for n in FIELDS[:4]}
            fields = {names.get(name, name): value for name, value in fields.items()}
            return step_gradients(model, None, attention_mask=None, **fields, **common, **more)

        padded = gradients(pad_trajectories(tokens, masks, pad_to_multiple=4))
        packing = pack_trajectories(tokens, masks, pad_to_multiple=4)
        packed = gradients(packing, packed_seq_params=packing.packed_seq_params)
    assert nonzero(padded) == {name for name in padded if is_mtp_param(name)}
    assert worst_difference(padded, packed) <= (1e-12, "~")
