"""Gradients accumulated over microbatches of very uneven masks, against one whole batch.

Two data-parallel times two context-parallel ranks with two microbatches each, through DDP,
Megatron's schedule and finalize_model_grads. The reference is one rank that runs the model once on
all rows and differentiates the objective written out in plain torch.

    python -m pytest tests/unit_tests/transformer/test_mtp_ddp_accumulation.py
"""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_model,
    fp64_cross_entropy,
    is_mtp_param,
    parallel_world,
    prepare,
    run_ranks,
    worst_difference,
)
from tests.support.claims import supports
from tests.support.ddp_training import Trainer, Training, microbatches, rows_of
from tests.support.objective import reference_objective, reference_targets

prepare()

# Targets per row. 32 in all: finalize_model_grads divides by them in float32, exactly so.
LENGTH, TARGETS = 16, [2, 13, 1, 16]
DEPTHS, MICROBATCHES, RANKS = 2, 2, 4
MODES = ["microbatch", "global"]
LOSSES = ["mean", "per token"]
ISOLATED = [True, False]


def whole_batch():
    masks = [[int(t < n) for t in range(LENGTH)] for n in TARGETS]
    batch = bshd_batch(len(TARGETS), LENGTH, mask=masks)
    return dataclasses.replace(batch, loss_mask=batch.loss_mask.double())


def spec_of(mode, loss, isolated):
    return ModelSpec(
        mtp_num_layers=DEPTHS,
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        per_token=loss == "per token",
        overrides=dict(
            mtp_isolated_loss=isolated, mtp_loss_normalization=mode, mtp_loss_scaling_factor=0.3
        ),
    )


def counts():
    """Targets of the global batch at depth 0, 1, ..."""
    return [reference_targets(whole_batch(), k)[1].sum().item() for k in range(1 + DEPTHS)]


def normalizer(loss):
    """What a trainer passes for an exact mean of each depth over the global batch."""
    reduction = RANKS * MICROBATCHES if loss == "mean" else counts()[0]
    return torch.tensor(counts()[1:], dtype=torch.float64) / reduction


CASES = {
    (mode, loss, isolated, given): dict(mtp_loss_normalizer=normalizer(loss)) if given else {}
    for mode, loss, isolated, given in itertools.product(MODES, LOSSES, ISOLATED, (False, True))
    if given or (mode, loss) != ("global", "mean")
}


def in_words(case):
    mode, loss, isolated, given = case
    heads = "isolated" if isolated else "attached"
    return f"{mode}, {loss}, {heads}, {'normalizer' if given else 'no normalizer'}"


def accumulated_on_rank():
    """Gradients of every case and parameter on this rank."""
    found = {}
    with parallel_world(cp=2) as groups, fp64_cross_entropy():
        for (mode, loss, isolated, given), forward in CASES.items():
            training = Training(optimizer=False, bucket_size=2000, forward=forward)
            trainer = Trainer(spec_of(mode, loss, isolated), training, groups)
            trainer.backward(microbatches(whole_batch(), groups, MICROBATCHES))
            found[mode, loss, isolated, given] = trainer.gradients()
    return found


def whole_gradients(mode, loss, isolated, given):
    """Gradients of the same objective, written out, by one pass over the whole batch."""
    batch, states = whole_batch(), []
    model = build_model(spec_of(mode, loss, isolated))
    hook = model.mtp.register_forward_hook(lambda _module, _args, output: states.append(output))
    forward = dict(batch.forward_kwargs(), return_logits=True, mtp_loss_normalizer=1.0)
    logits_BSV = model(**forward)
    hook.remove()
    weight = model.output_layer.weight.detach() if isolated else model.output_layer.weight
    depths = [F.linear(h, weight) for h in states[0].chunk(1 + DEPTHS)[1:]]
    rows = [
        (rows_of(batch, slice(i, i + 1)), [depth[:, i : i + 1] for depth in depths])
        for i in range(len(TARGETS))
    ]
    tokens, config = counts()[0], model.config
    if given:
        heads = reference_objective(depths, batch, config, counts()[1:])
    elif mode == "global":
        heads = reference_objective(depths, batch, config) / tokens
    else:
        heads = sum(reference_objective(part, row, config) for row, part in rows)
        heads = heads / (tokens if loss == "per token" else len(rows))
    loss_BS = F.cross_entropy(logits_BSV.transpose(1, 2), batch.labels, reduction="none")
    loss_BS = loss_BS * torch.sin(batch.labels.double()) * batch.loss_mask
    if loss == "per token":
        policy = loss_BS.sum() / tokens
    else:
        policy = (loss_BS.sum(1) / batch.loss_mask.sum(1)).mean()
    names, parameters = zip(*model.named_parameters())
    # These logits carry the model's own objective: send the policy's gradient through others.
    (gradient,) = torch.autograd.grad(policy, logits_BSV)
    policy = (model(**forward, compute_mtp_loss=False) * gradient).sum()
    gradients = torch.autograd.grad(heads + policy, parameters, materialize_grads=True)
    return dict(zip(names, gradients))


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(accumulated_on_rank, RANKS, timeout=120.0)


@pytest.fixture
def one_rank():
    with parallel_world(), fp64_cross_entropy():
        yield


@supports("Gradient accumulation with uneven masks, DP=2 × CP=2", agrees=1e-12, ranks=4)
@pytest.mark.parametrize("mode, loss, isolated, given", CASES, ids=map(in_words, CASES))
def test_gradients_are_those_of_the_whole_batch(ranks, one_rank, mode, loss, isolated, given):
    want = whole_gradients(mode, loss, isolated, given)
    for rank in ranks:
        assert worst_difference(rank[mode, loss, isolated, given], want) <= (1e-12, "~")


@pytest.mark.parametrize("loss", LOSSES)
def test_a_mean_per_microbatch_weighs_targets_otherwise_than_the_global_batch(ranks, loss):
    for rank in ranks:
        heads = [
            {n: g for n, g in rank["microbatch", loss, True, given].items() if is_mtp_param(n)}
            for given in (False, True)
        ]
        assert worst_difference(*heads) > (0.05, "")
