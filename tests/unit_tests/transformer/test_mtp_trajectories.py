"""From trajectories of reinforcement learning to labels, masks and packed rows.

What is refused is in ``test_mtp_trajectories_refused.py``.

    python -m pytest tests/unit_tests/transformer/test_mtp_trajectories.py
"""

import math
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
    run_ranks,
    shard,
    worst_difference,
)
from tests.support.objective import nonzero, step_gradients
from tests.support.rows import packed_seq_params

prepare()

from megatron.core.transformer.mtp_objective import (
    IGNORED_LABEL,
    pack_trajectories,
    prediction_aligned_targets,
)

NONE = IGNORED_LABEL


def tensor(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device())


def lists(tensors):
    return [part[0].tolist() for part in tensors]


def test_a_label_is_the_next_token_of_the_same_row_and_brings_its_own_mask():
    # Two answers of different length behind prompts, padded with 0 to one length.
    tokens = tensor([[10, 11, 12, 13, 0, 0], [20, 21, 22, 23, 24, 25]])
    sampled = tensor([[0, 0, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1]])
    labels, loss_mask = prediction_aligned_targets(tokens, sampled)
    assert labels.tolist() == [[11, 12, 13, 0, 0, NONE], [21, 22, 23, 24, 25, NONE]]
    assert loss_mask.tolist() == [[0, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_narrow_tokens_have_room_for_the_ignored_label(dtype):
    labels, _ = prediction_aligned_targets(tensor([[10, 11]], dtype), tensor([[1, 1]]))
    assert labels.dtype == torch.int64 and labels.tolist() == [[11, NONE]]


@pytest.mark.parametrize(
    "bounds, tokens, labels, loss_mask",
    [
        (([0, 3, 5],), [10, 11, 12, 20, 21], [11, 12, NONE, 21, NONE], [1, 1, 0, 1, 0]),
        (
            ([0, 3, 5], [0, 4, 8]),
            [10, 11, 12, 0, 20, 21, 0, 0],
            [11, 12, NONE, NONE, 21, NONE, NONE, NONE],
            [1, 1, 0, 0, 1, 0, 0, 0],
        ),
        (([0, 1, 2],), [10, 20], [NONE, NONE], [0, 0]),
        (([0, 0, 2],), [20, 21], [21, NONE], [1, 0]),
    ],
    ids=["unpadded", "padded", "of-one-token", "empty-first"],
)
def test_no_label_crosses_into_the_next_packed_sequence(bounds, tokens, labels, loss_mask):
    # Everything was sampled: there are no prompts whose mask would hide a crossing.
    row = tensor([tokens])
    got = prediction_aligned_targets(row, torch.ones_like(row), packed_seq_params(*bounds))
    assert lists(got) == [labels, loss_mask]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.float64])
def test_the_mask_keeps_its_dtype_and_its_weights(dtype):
    weights = tensor([[0.0, 0.5, 2.0]]).to(dtype)
    labels, loss_mask = prediction_aligned_targets(tensor([[10, 11, 12]]), weights)
    assert labels.dtype == torch.int64 and loss_mask.dtype == dtype
    assert loss_mask.tolist() == [[*weights[0, 1:].tolist(), 0]]


def random_row(seed, cp):
    """Tokens, weights and boundaries of a packed row whose padded lengths cp can split."""
    draw = random.Random(seed)
    lengths = [draw.randint(0, 12) for _ in range(4)]
    chunks = [math.ceil(length / (2 * cp)) + draw.randint(0, 1) for length in lengths]
    padded = [2 * cp * chunk for chunk in chunks]
    starts = [sum(padded[:n]) for n in range(5)]
    values = [draw.randint(1, 99) for _ in range(starts[-1])]
    weights = [draw.random() for _ in values]
    params = packed_seq_params([sum(lengths[:n]) for n in range(5)], starts)
    return tensor([values]), tensor([weights], torch.float64), params, starts


def targets_on_rank(cp):
    """Cases whose targets on this rank are not its part of those of the whole."""
    differing = []
    with parallel_world(cp=cp) as groups:
        for seed in range(40):
            tokens, weights, params, starts = random_row(seed, cp)
            if seed % 4 == 0:  # BSHD
                params = starts = None
            if not tokens.numel():
                continue
            whole = prediction_aligned_targets(tokens, weights, params)
            part = (shard(field, cp, groups.cp.rank(), starts) for field in (tokens, weights))
            got = prediction_aligned_targets(*part, params, groups.cp)
            for one, other in zip(got, whole):
                if not torch.equal(one, shard(other, cp, groups.cp.rank(), starts)):
                    differing.append(f"seed {seed}: got {one}, whole {other}")
        try:
            prediction_aligned_targets(tensor([[1] * 5]), tensor([[1] * 5]), None, groups.cp)
        except ValueError as error:
            return differing, str(error)


@pytest.mark.parametrize("cp", [2, 4])
def test_each_context_parallel_rank_gets_its_part_of_the_targets_of_the_whole(cp):
    for differing, refusal in run_ranks(targets_on_rank, cp, cp):
        assert differing == []
        assert f"got 5: pad each row to a multiple of 2·cp = {2 * cp}" in refusal


def test_trajectories_are_laid_back_to_back_and_padded_so_that_ranks_can_split_them():
    tokens = [tensor([10, 11, 12, 13, 14]), tensor([20]), tensor([30, 31])]
    sampled = [tensor([0, 0, 1, 1, 1]), tensor([1]), tensor([1, 1])]
    packed = pack_trajectories(tokens, sampled, cp_size=1, pad_to_multiple=4, pad_token=63)
    fields = (packed.tokens, packed.position_ids, packed.labels, packed.loss_mask)
    assert lists(fields) == [
        [10, 11, 12, 13, 14, 63, 63, 63, 20, 63, 63, 63, 30, 31, 63, 63],
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1, 2, 3],
        [11, 12, 13, 14] + [NONE] * 8 + [31] + [NONE] * 3,
        [0, 1, 1, 1] + [0] * 8 + [1] + [0] * 3,
    ]
    assert [f.dtype for f in fields] == [torch.int64] * 3 + [torch.float32]
    params = packed.packed_seq_params
    assert params.qkv_format == "thd" and params.max_seqlen_q == params.max_seqlen_kv == 8
    for real, padded in [
        (params.cu_seqlens_q, params.cu_seqlens_q_padded),
        (params.cu_seqlens_kv, params.cu_seqlens_kv_padded),
    ]:
        assert real.tolist() == [0, 5, 6, 8] and padded.tolist() == [0, 8, 12, 16]
        assert real.dtype == padded.dtype == torch.int32


def test_without_a_prompt_the_first_token_is_nobodys_target():
    packed = pack_trajectories([tensor([10, 11]), tensor([20, 21])], [tensor([1, 1])] * 2)
    assert lists([packed.labels, packed.loss_mask]) == [[11, NONE, 21, NONE], [1, 0, 1, 0]]


@pytest.mark.parametrize(
    "cp_size, multiple, want", [(1, 1, [5, 1]), (2, 1, [8, 4]), (2, 6, [12, 12]), (4, 3, [24, 24])]
)
def test_padded_lengths_divide_by_the_ranks_chunks_and_by_the_multiple(cp_size, multiple, want):
    tokens = [tensor([10, 11, 12, 13, 14]), tensor([20])]
    packed = pack_trajectories(
        tokens, [t > 0 for t in tokens], cp_size=cp_size, pad_to_multiple=multiple
    )
    assert packed.packed_seq_params.cu_seqlens_q_padded.diff().tolist() == want
    assert packed.tokens.shape == (1, sum(want) // cp_size)


@hypothesis.given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    cp=st.sampled_from([1, 2, 4]),
    multiple=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_what_was_packed_can_be_read_back_from_the_parts_of_all_ranks(lengths, cp, multiple, seed):
    draw = random.Random(seed)
    trajectories = [[draw.randint(1, 99) for _ in range(length)] for length in lengths]
    weights = [[draw.choice([0.0, 0.25, 1.0]) for _ in range(length)] for length in lengths]
    given = [tensor(t) for t in trajectories], [tensor(w, torch.float32) for w in weights]
    whole = pack_trajectories(*given, pad_to_multiple=math.lcm(multiple, 1 if cp == 1 else 2 * cp))
    starts = whole.packed_seq_params.cu_seqlens_q_padded.tolist()
    for start, tokens, mask in zip(starts, trajectories, weights):
        end = start + len(tokens)
        assert whole.tokens[0, start:end].tolist() == tokens
        assert whole.labels[0, start:end].tolist() == (tokens[1:] + [NONE])[: len(tokens)]
        assert whole.loss_mask[0, start:end].tolist() == (mask[1:] + [0.0])[: len(tokens)]
    assert int((whole.labels != NONE).sum()) == sum(max(length - 1, 0) for length in lengths)
    for rank in range(cp):
        part = pack_trajectories(*given, cp_size=cp, cp_rank=rank, pad_to_multiple=multiple)
        assert part.packed_seq_params.cu_seqlens_q_padded.tolist() == starts
        for name in ("tokens", "position_ids", "labels", "loss_mask"):
            want = shard(getattr(whole, name), cp, rank, starts)
            assert torch.equal(getattr(part, name), want), name


def test_heads_train_on_packed_trajectories_as_on_each_alone():
    trajectories = [[10, 11, 12, 13, 14, 15, 16], [20, 21, 22], [30, 31, 32, 33, 34]]
    weights = [[0, 0, 1.0, 1.0, 0.5, 1.0, 1.0], [0, 2.0, 2.0], [0, 1.0, 0, 1.0, 1.0]]

    def gradients(model, chosen):
        tokens = [tensor(trajectories[i]) for i in chosen]
        masks = [tensor(weights[i], torch.float64) for i in chosen]
        batch = pack_trajectories(tokens, masks, pad_to_multiple=4, pad_token=63)
        return step_gradients(
            model,
            None,
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            attention_mask=None,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            packed_seq_params=batch.packed_seq_params,
            return_logits=True,
            mtp_isolated_loss=True,
            mtp_loss_normalizer=8.0,
        )

    with parallel_world(), fp64_cross_entropy():
        model = build_model(ModelSpec(num_layers=1, hidden_size=16, num_attention_heads=2))
        together = gradients(model, [0, 1, 2])
        alone = [gradients(model, [i]) for i in range(3)]
        added = {name: sum(one[name] for one in alone) for name in together}
        assert nonzero(together) == {name for name in together if is_mtp_param(name)}
        assert worst_difference(together, added) <= (1e-12, "~")
