"""Experts spread over ranks compute what one rank computes."""

import pytest
import torch

from tests.support import parallel_world, prepare, run_ranks
from tests.tools.mtp_checkpoint.native_support import (
    Kind,
    directory,
    hidden_states,
    imported,
    inputs,
    reference,
)

prepare()

KIND = Kind("qwen3_5_moe", "packed", "bf16")
EXPERTS = 8


def _step(ranks: int) -> dict:
    """Loss, hidden states and gradients of a batch every rank has; experts by global number."""
    ids_BS, positions_BS, hidden_BSH = inputs()
    with parallel_world(ep=ranks) as groups:
        head = imported(KIND, groups)
        out_BSH = hidden_states(head, KIND, ids_BS, positions_BS, hidden_BSH)
        logits_BSV = out_BSH[:, :-2] @ reference(KIND).output_VH.t()
        loss = torch.nn.functional.cross_entropy(
            logits_BSV.flatten(0, 1), ids_BS[:, 2:].flatten()
        )
        loss.backward()
        dense, experts = {}, {}
        for name, parameter in head.named_parameters():
            before, _, after = name.partition(".local_experts.")
            if not after:
                dense[name] = parameter.grad
                continue
            local, rest = after.split(".", 1)
            number = int(local) + groups.ep.rank() * EXPERTS // ranks
            experts[f"{before}.{number}.{rest}"] = parameter.grad
    return dict(loss=loss, hidden=out_BSH, dense=dense, experts=experts)


@pytest.fixture(scope="module")
def one_rank():
    reference(KIND), directory(KIND)  # made before the ranks fork
    return run_ranks(_step, 1, 1)[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_batch_on_every_rank_gives_one_ranks_loss_and_gradients(one_rank, ranks):
    """Dense ones bit for bit; experts get every row once per rank, so the sum of equal parts."""
    results = run_ranks(_step, ranks, ranks)
    experts = {name: grad for result in results for name, grad in result["experts"].items()}
    assert len(experts) == 2 * EXPERTS == sum(len(result["experts"]) for result in results)
    for result in results:
        assert torch.equal(result["loss"], one_rank["loss"])
        assert torch.equal(result["hidden"], one_rank["hidden"])
        assert result["dense"].keys() == one_rank["dense"].keys()
        for name, want in one_rank["dense"].items():
            assert torch.equal(result["dense"][name], want), name
    for name, want in one_rank["experts"].items():
        assert want.any(), name
        assert (experts[name] / ranks - want).abs().max() <= 1e-8, name


def _own_batch(ranks: int) -> float:
    """The largest difference from the reference on a batch that only this rank has."""
    with parallel_world(ep=ranks) as groups:
        head = imported(KIND, groups)
        rank = groups.ep.rank()
        batch = inputs(batch=1 + rank, length=24 - 5 * rank, seed=rank)
        got_BSH = hidden_states(head, KIND, *batch)
        want_BSH, _ = reference(KIND)(*batch)
    return (got_BSH - want_BSH).abs().max().item()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_may_have_batches_of_their_own_and_of_different_sizes(one_rank, ranks):
    assert max(run_ranks(_own_batch, ranks, ranks)) <= 5e-6
