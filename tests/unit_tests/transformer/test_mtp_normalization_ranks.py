"""The weight of each target on two ranks: C1, C2 and C4 of the known faults.

    python -m pytest tests/unit_tests/transformer/test_mtp_normalization_ranks.py
"""

import pytest
import torch

from tests.support import (
    all_reduce_gradients,
    bshd_batch,
    cp_shard,
    device,
    parallel_world,
    prepare,
    run_ranks,
)

prepare()

from megatron.core.transformer.multi_token_prediction import process_mtp_loss
from megatron.core.transformer.transformer_config import TransformerConfig


def weigh(mask, token_loss, groups, cp, per_token, normalizer=None):
    """Gradient of a factor of every token loss, after the reduction over ranks: Σ of weights."""
    batch = cp_shard(bshd_batch(1, 8, mask=[mask]), cp, groups.cp.rank())
    length = batch.input_ids.size(1)
    factor = torch.nn.Parameter(torch.ones((), dtype=torch.float64, device=device()))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=1,
        num_attention_heads=1,
        mtp_num_layers=1,
        mtp_loss_scaling_factor=1.0,
        calculate_per_token_loss=per_token,
    )
    out = process_mtp_loss(
        hidden_states=torch.zeros(2 * length, 1, 1, device=device()).requires_grad_(),
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        output_layer=lambda hidden, **_: (hidden, None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=lambda labels, _: factor * token_loss * torch.ones_like(labels),
        config=config,
        cp_group=groups.cp,
        mtp_loss_normalizer=normalizer,
    )
    (0 * out).sum().backward()
    all_reduce_gradients(torch.nn.ParameterList([factor]), groups.dp_cp, average=not per_token)
    if per_token:  # as finalize_model_grads does
        tokens = batch.loss_mask.sum()
        torch.distributed.all_reduce(tokens, group=groups.dp_cp)
        factor.grad /= tokens
    return factor.grad.item()


def weights_on_two_ranks():
    """One label under CP=2; unequal ranks under DP=2."""
    found = {}
    with parallel_world(cp=2) as groups:
        for position in (2, 6):
            mask = [int(t == position) for t in range(8)]
            for per_token in (True, False):
                found["cp", position, per_token] = weigh(mask, 1.0, groups, 2, per_token)
    with parallel_world() as groups:
        # Rank 0: 2 labels, the first rolls out, token loss 10. Rank 1: 7 labels, token loss 1.
        mask, token_loss = [([1] * 2 + [0] * 6, 10.0), ([0] + [1] * 7, 1.0)][groups.dp.rank()]
        for per_token, normalizer in [
            (True, None),
            (False, None),
            (True, 8 / 9),
            (False, 8 / 2),
            (False, torch.tensor(4.0)),
        ]:
            key = "dp", per_token, None if normalizer is None else float(normalizer)
            found[key] = weigh(mask, token_loss, groups, 1, per_token, normalizer)
    return found


@pytest.fixture(scope="module")
def two_ranks():
    first, second = run_ranks(weights_on_two_ranks, 2)
    assert first == second
    return first


@pytest.mark.parametrize("per_token", [True, False], ids=["per-token", "mean"])
@pytest.mark.parametrize("position", [2, 6])
def test_a_single_label_weighs_one_under_context_parallelism(two_ranks, position, per_token):
    assert two_ranks["cp", position, per_token] == pytest.approx(1.0, rel=1e-12)


def test_a_normalizer_gives_every_target_of_two_ranks_the_same_weight(two_ranks):
    # 8 targets, one with loss 10: the global mean is 17/8. The caller divides its own reduction
    # out: the mean over 2 ranks (8 / 2), or per token the division by all 9 labels (8 / 9).
    assert two_ranks["dp", False, 4.0] == pytest.approx(17 / 8, rel=1e-12)
    assert two_ranks["dp", True, 8 / 9] == pytest.approx(17 / 8, rel=1e-12)


def test_without_a_normalizer_each_microbatch_is_a_mean_of_its_own(two_ranks):
    assert two_ranks["dp", False, None] == pytest.approx((10 + 1) / 2)
    assert two_ranks["dp", True, None] == pytest.approx((2 * 10 + 7 * 1) / 9)
