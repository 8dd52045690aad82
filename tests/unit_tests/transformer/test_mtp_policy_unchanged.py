"""Training isolated heads leaves the policy bit for bit what it is without them.

Twenty optimizer steps with clipping, from the same weights and seeds, with the heads' objective
computed and not computed. Compared on every rank: the policy's parameters, buffers, Adam states,
and its gradient norm at every step.

    python -m pytest tests/unit_tests/transformer/test_mtp_policy_unchanged.py
"""

import dataclasses
import itertools

import pytest
import torch

from tests.support import ModelSpec, is_mtp_param, parallel_world, prepare, run_ranks
from tests.support.claims import supports
from tests.support.ddp_training import Trainer, Training, global_batch, microbatches

prepare()

STEPS, CLIP = 20, 0.05
DROPOUT = {"no dropout": {}, "dropout": dict(hidden_dropout=0.1, attention_dropout=0.1)}
EXPERTS = dict(
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=0.01,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_input_jitter_eps=0.01,
)
ADAM = Training(clip_grad=CLIP, bucket_size=4000)
DISTRIBUTED = dataclasses.replace(ADAM, distributed_optimizer=True, overlap_param_gather=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """One claim: a model, how it is trained, and whether its heads are isolated."""

    spec: ModelSpec
    training: Training = ADAM
    world: tuple = ()
    steps: int = STEPS
    own_stream: bool = True

    def policy_after(self, compute_mtp_loss, seed=3):
        """The policy's tensors and gradient norms after all steps, and the heads' parameters."""
        with parallel_world(seed=seed, **dict(self.world)) as groups:
            trainer, norms = Trainer(self.spec, self.training, groups), []
            if not self.own_stream and hasattr(trainer.model.module, "mtp"):
                trainer.model.module.mtp.shares_random_stream = False
            for step in range(self.steps):
                batch = microbatches(global_batch(step), groups)
                norms.append(trainer.step(batch, compute_mtp_loss=compute_mtp_loss))
            named = {**trainer.parameters(), **dict(trainer.model.module.named_buffers())}
            policy = [value.clone() for name, value in named.items() if not is_mtp_param(name)]
            policy += trainer.optimizer_state(of_heads=False)
            heads = [value for name, value in named.items() if is_mtp_param(name)]
        return policy, norms, heads


def spec_of(isolated=True, tied=False, experts=0, family="gpt", **overrides):
    return ModelSpec(
        family=family,
        tied=tied,
        num_experts=experts,
        hidden_size=16,
        num_attention_heads=2,
        dtype=torch.float32,
        overrides=dict(mtp_isolated_loss=isolated, mtp_loss_scaling_factor=3.0, **overrides),
    )


def both(case):
    """What differs on this rank between training the heads and not, as plain numbers."""
    trained, norms, heads = case.policy_after(True)
    off, norms_off, heads_off = case.policy_after(False)
    return dict(
        compared=len(trained),
        differing=sum(not torch.equal(a, b) for a, b in zip(trained, off, strict=True)),
        norms=norms,
        same_norms=norms == norms_off,
        heads_trained=sum(not torch.equal(a, b) for a, b in zip(heads, heads_off, strict=True)),
        heads=len(heads),
    )


CONTEXT, STAGES = (("cp", 2),), (("pp", 2),)
DATA_AND_CONTEXT = {
    "dense, no dropout, adam": Case(spec_of(), ADAM, CONTEXT),
    "dense, dropout, distributed optimizer": Case(
        spec_of(**DROPOUT["dropout"]), DISTRIBUTED, CONTEXT
    ),
    "hybrid, dropout, adam": Case(spec_of(family="hybrid", **DROPOUT["dropout"]), ADAM, CONTEXT),
    **{
        f"experts, {dropout}": Case(
            spec_of(experts=4, **EXPERTS, **fields), DISTRIBUTED, (*CONTEXT, ("ep", 2))
        )
        for dropout, fields in DROPOUT.items()
    },
}
PIPELINE = {
    f"{'tied' if tied else 'untied'}, {dropout}": Case(
        spec_of(tied=tied, **fields), training, STAGES
    )
    for (tied, training), (dropout, fields) in itertools.product(
        [(False, ADAM), (True, DISTRIBUTED)], DROPOUT.items()
    )
}
CLAIMS = {**DATA_AND_CONTEXT, **PIPELINE}
# What must be noticed: the same comparison without isolation, and without the heads' own stream.
BROKEN = {
    "attached heads": Case(spec_of(isolated=False), ADAM, CONTEXT, steps=3),
    "attached heads on the last stage": Case(spec_of(isolated=False), ADAM, STAGES, steps=3),
    "one random stream": Case(
        spec_of(**DROPOUT["dropout"]), ADAM, CONTEXT, steps=3, own_stream=False
    ),
}


def on_rank(names):
    return {name: both({**CLAIMS, **BROKEN}[name]) for name in names}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_rank, 4, [*CLAIMS, *BROKEN], timeout=400.0)


@supports(
    "Isolation over twenty clipped optimizer steps",
    equal="the policy and optimizer state trained without heads",
    ranks=4,
    dtype="float32",
)
@pytest.mark.parametrize(
    "name", CLAIMS, ids=lambda name: ("PP=2 with DP=2, " if name in PIPELINE else "DP=2 with CP=2, ") + name
)
def test_the_policy_is_bit_for_bit_the_one_without_heads(ranks, name):
    for rank in ranks:
        found = rank[name]
        assert found["compared"] > 15
        assert found["differing"] == 0
        assert found["same_norms"]
        assert len(found["norms"]) == STEPS
        assert min(found["norms"]) > CLIP


@pytest.mark.parametrize("name", CLAIMS)
def test_the_heads_were_trained_meanwhile(ranks, name):
    with_heads = [rank[name] for rank in ranks if rank[name]["heads"]]
    assert len(with_heads) == (2 if name in PIPELINE else 4)
    for found in with_heads:
        assert found["heads_trained"] >= 0.9 * found["heads"]


@pytest.mark.parametrize("name", BROKEN)
def test_the_comparison_notices_what_isolation_prevents(ranks, name):
    for rank in ranks:
        assert rank[name]["differing"] > 0.5 * rank[name]["compared"]
