"""AReaL 1.0.4's engine splits, packs, trains and weighs; our adapter trains the heads in it.

    make clients && python -m pytest tests/examples/test_integrations_areal.py
"""

import functools
import logging
import types

import pytest
import torch

from tests.examples.integration_support import direct, gradients, heads, masks_of, policy, tiny
from tests.support import (
    device,
    fp64_cross_entropy,
    parallel_world,
    prepare,
    run_ranks,
    worst_difference,
)
from tests.examples.clients import import_client, needs_client
from tests.support.objective import nonzero
from tests.support.whole_gradients import whole_gradients

prepare()
pytestmark = needs_client("areal")

STEP = ((3, 5), (2, 6), (4, 3), (0, 7))  # the last prompt is empty
# Context-, tensor-, data- and pipeline-parallel sizes on two ranks.
LAYOUTS = [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]


@pytest.fixture(scope="module")
def whole_step():
    """Gradients of our own call on all trajectories of the step at once: the token mean."""
    with parallel_world() as groups, fp64_cross_entropy():
        model = tiny(groups)
        return heads(gradients(model, groups, 0 * direct(model, groups, STEP).sum()))


@pytest.fixture(scope="module")
def found_by_two():
    """What each of two ranks found in every layout: AReaL takes seconds to import."""
    return run_ranks(steps, 2, LAYOUTS, timeout=240)


@pytest.fixture(scope="module", params=[None, *LAYOUTS], ids=str)
def found(request):
    """What every rank found in one layout; None: on one rank."""
    if request.param is None:
        return [found[1, 1, 1, 1] for found in run_ranks(steps, 1, [(1, 1, 1, 1)], timeout=120)]
    return [found[request.param] for found in request.getfixturevalue("found_by_two")]


def test_heads_train_on_the_token_mean_of_the_step_however_areal_splits_it(found, whole_step):
    for rank in found:
        assert worst_difference(heads(rank["heads alone"]), whole_step)[0] <= 1e-12


def test_nothing_but_heads_trains_when_the_policy_loss_is_zero(found):
    for rank in found:
        assert nonzero(rank["heads alone"]) == nonzero(heads(rank["heads alone"])) != set()


def test_the_policy_gets_the_gradients_of_areal_without_heads_to_the_bit(found):
    for rank in found:
        with_heads, without = policy(rank["policy and heads"]), rank["no heads"]
        assert with_heads.keys() == without.keys() and nonzero(without)
        assert all(torch.equal(with_heads[name], without[name]) for name in without)


def test_areal_packs_the_tokens_that_our_packing_does(found):
    for rank in found:
        theirs, ours = rank["packed"]
        assert torch.equal(theirs, ours)


def test_forward_only_passes_run_no_heads(found):
    for rank in found:
        assert rank["heads ran"] in ((False, True), None)  # evaluation, training; no heads here
    assert any(rank["heads ran"] for rank in found)


def steps(layouts):
    import_client("areal")
    from examples.integrations import mtp_areal

    mtp_areal.install()
    return {layout: step(*layout) for layout in layouts}


def step(cp, tp, dp, pp):
    with parallel_world(cp=cp, tp=tp, pp=pp) as groups, fp64_cross_entropy():
        assert groups.dp.size() == dp
        return {
            "heads alone": train(engine_of(groups), 0.0, groups),
            "policy and heads": train(engine_of(groups), 1.0, groups),
            "no heads": train(engine_of(groups, mtp_num_layers=None), 1.0, groups),
            "packed": packed(groups),
            "heads ran": heads_ran(groups),
        }


class Optimizer:
    """Keeps the gradients where they are."""

    param_groups = [{"lr": 0.0}]

    def zero_grad(self):
        """DDP's buffers hold them."""

    def get_loss_scale(self):
        """Nothing is scaled."""
        return torch.tensor(1.0)

    def step(self):
        """Successful, no norm, no count of zeros."""
        return True, None, None


def engine_of(groups, **overrides):
    """AReaL's engine around a tiny model in Megatron's DDP, without its own set-up of a cluster."""
    from areal.api.cli_args import MicroBatchSpec
    from areal.engine.megatron_engine import MegatronEngine
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import finalize_model_grads

    model = tiny(groups, **overrides)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.variable_seq_lengths = True
    engine = MegatronEngine.__new__(MegatronEngine)
    engine.model = [DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)]
    engine.optimizer = Optimizer()
    engine.config = types.SimpleNamespace(
        is_critic=False, temperature=1.0, mb_spec=MicroBatchSpec(n_mbs=2), pad_to_maximum=False
    )
    engine.parallel_strategy = types.SimpleNamespace(
        tensor_parallel_size=groups.tp.size(),
        context_parallel_size=groups.cp.size(),
        pipeline_parallel_size=groups.pp.size(),
    )
    engine.enable_tree_training = engine.enable_fp8 = engine.is_vision_model = False
    engine.use_padded_seq = engine.is_offload = False
    engine.device, engine.logger = device(), logging.getLogger("areal")
    return engine


def batch_of(groups):
    """This data-parallel rank's trajectories, padded; AReaL's actor has rolled the mask."""
    own = STEP[groups.dp.rank() :: groups.dp.size()]
    first = [10 * (STEP.index(pair) + 1) for pair in own]
    tokens = [torch.arange(sum(pair), device=device()) + n for pair, n in zip(own, first)]
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    mask = torch.roll(pad(masks_of(own)), shifts=-1, dims=-1)
    attended = pad([torch.ones_like(sequence) for sequence in tokens])
    return {"input_ids": pad(tokens), "loss_mask": mask, "attention_mask": attended.bool()}


def actor_loss(weight, logprobs, entropy, inputs, **_others):
    """AReaL's PPO loss of an advantage per token."""
    from areal.utils.functional import ppo_actor_loss_fn

    loss, _ = ppo_actor_loss_fn(
        logprobs=logprobs,
        proximal_logprobs=logprobs.detach(),
        old_logprobs=logprobs.detach(),
        advantages=torch.sin(inputs["input_ids"].double()),
        eps_clip=0.2,
        loss_mask=inputs["loss_mask"].bool(),
    )
    return weight * loss


def train(engine, weight, groups):
    """Gradients of one step of AReaL's engine."""
    weigh = lambda inputs: inputs["loss_mask"].count_nonzero()  # noqa: E731 - as AReaL's actor
    engine.train_batch(batch_of(groups), functools.partial(actor_loss, weight), weigh)
    model = engine.model[0].module
    gradients = whole_gradients([model], groups)
    # They are added up over ranks that DDP, and stages that finalize_model_grads, made alike.
    gradients = {name: gradient / groups.dp_cp.size() for name, gradient in gradients.items()}
    if groups.pp.size() > 1 and model.config.mtp_num_layers:
        gradients["embedding.word_embeddings.weight"] /= 2
    return gradients


def packed(groups):
    """This rank's tokens of the first microbatch, packed by AReaL and by us."""
    from areal.engine.megatron_utils.packed_context_parallel import (
        preprocess_packed_seqs_context_parallel,
    )
    from megatron.core.transformer.mtp_objective import pack_trajectories

    engine = engine_of(groups)
    first = engine._prepare_mb_list(batch_of(groups)).padded_mbs[0]
    tokens, params = preprocess_packed_seqs_context_parallel(
        first["input_ids"], first["cu_seqlens"]
    )
    bounds = params.cu_seqlens_q_padded.tolist()
    sequences = [first["input_ids"][a:b] for a, b in zip(bounds, bounds[1:])]
    ours = pack_trajectories(
        sequences,
        [torch.ones_like(sequence) for sequence in sequences],
        cp_size=groups.cp.size(),
        cp_rank=groups.cp.rank(),
    )
    return tokens, ours.tokens


def heads_ran(groups):
    """Whether the heads run in an evaluation, and in a training step; None on a stage without."""
    engine, calls = engine_of(groups), []
    block = getattr(engine.model[0].module, "mtp", torch.nn.Identity())
    block.register_forward_hook(lambda *_: calls.append(1))
    mb_list = engine._prepare_mb_list(batch_of(groups))
    # Gradients stay on: that nothing runs is the adapter's doing.
    engine.forward_backward_batch(mb_list, lambda output, inputs: None, forward_only=True)
    evaluated = bool(calls)
    train(engine, 1.0, groups)
    return (evaluated, bool(calls)) if groups.pp.rank() == groups.pp.size() - 1 else None


def test_batches_that_areal_does_not_pack_are_refused():
    (message,) = run_ranks(refused, 1)
    assert message == "MTP heads train on packed text: turn them off for this model."


def refused():
    import_client("areal")
    from examples.integrations import mtp_areal

    mtp_areal.install()
    with parallel_world() as groups:
        engine = engine_of(groups)
        engine.use_padded_seq = True
        with pytest.raises(ValueError) as error:
            train(engine, 1.0, groups)
        return str(error.value)
