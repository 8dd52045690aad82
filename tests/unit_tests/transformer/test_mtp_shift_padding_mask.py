"""Padding stays padding at every depth: MoE routers of the heads count no padded token.

    python -m pytest tests/unit_tests/transformer/test_mtp_shift_padding_mask.py
"""

import pytest
import torch

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_model,
    cp_shard,
    device,
    parallel_world,
    prepare,
    run_ranks,
    shard,
    thd_batch,
)
from tests.support.release import require_padding_mask

prepare()

LENGTHS, PLACES = (5, 3), (8, 4)
PADDING = [[0] * 5 + [1] * 3 + [0] * 3 + [1]]


def masks_at_the_routers(cp=1):
    """The padding mask each router of the model gets: two of the decoder, then one per depth."""
    seen = []
    with parallel_world(cp=cp) as groups:
        model = build_model(ModelSpec(num_experts=4))
        rank = groups.cp.rank()
        batch = cp_shard(thd_batch(LENGTHS, PLACES), cp, rank)
        padding = torch.tensor(PADDING, dtype=torch.bool, device=device())
        padding = shard(padding, cp, rank, batch.cu_seqlens_padded)
        for name, module in model.named_modules():
            if name.endswith("router"):
                module.register_forward_pre_hook(
                    lambda _, args, kwargs: seen.append((*args, *kwargs.values())[1].clone()),
                    with_kwargs=True,
                )
        model(**batch.forward_kwargs(), padding_mask=padding)
    return [mask.flatten().int().tolist() for mask in seen]


@pytest.mark.parametrize("cp", [1, 2])
def test_behind_the_end_of_a_padded_sequence_lies_padding_at_every_depth(cp):
    require_padding_mask()
    # Depth k embeds the token k ahead, which the last k tokens of a sequence do not have.
    want = [
        PADDING[0],
        PADDING[0],
        [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1],
        [0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1],
    ]
    starts = (0, 8, 12)
    for rank, got in enumerate(run_ranks(masks_at_the_routers, cp, cp)):
        parts = [shard(torch.tensor([mask]), cp, rank, starts)[0].tolist() for mask in want]
        assert got == parts


def test_without_padded_boundaries_the_mask_rolls_as_upstreams():
    require_padding_mask()
    seen = []
    with parallel_world():
        model = build_model(ModelSpec(num_experts=4))
        batch = bshd_batch(1, 8)
        padding = torch.tensor([[0] * 6 + [1] * 2], dtype=torch.bool, device=device())
        for layer in model.mtp.layers:
            layer.register_forward_hook(lambda _, args, output: seen.append(output[3]))
        model(**batch.forward_kwargs(), padding_mask=padding)
    assert [mask[0].int().tolist() for mask in seen] == [
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
    ]
