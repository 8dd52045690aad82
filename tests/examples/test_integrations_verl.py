"""verl 0.9.1 drives a GPTModel with heads through its own packing, with our adapter in it.

    make clients && python -m pytest tests/examples/test_integrations_verl.py
"""

import pytest
import torch

from tests.examples.integration_support import (
    TRAJECTORIES,
    direct,
    gradients,
    heads,
    masks_of,
    nested,
    policy,
    tiny,
    tokens_of,
)
from tests.support import fp64_cross_entropy, parallel_world, prepare, run_ranks, worst_difference
from tests.examples.clients import import_client, needs_client
from tests.support.objective import nonzero
from tests.support.whole_gradients import whole_gradients

prepare()
pytestmark = needs_client("verl")

EMPTY_PROMPT = ((3, 5), (0, 4), (2, 3))


@pytest.fixture(scope="module")
def found():
    """What one rank found, by the name of the check: verl takes seconds to import."""
    (found,) = run_ranks(on_one_rank, 1, timeout=180)
    return found


@pytest.fixture(scope="module")
def on_both():
    """What each of two ranks found, by context- and tensor-parallel size."""
    return run_ranks(on_two_ranks, 2, [(2, 1), (1, 2)], timeout=180)


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["cp2", "tp2"])
def found_by_two(request, on_both):
    """The same of one layout: sequences are split, or padded for tensor parallelism."""
    return [found[request.param] for found in on_both]


def test_heads_train_as_by_our_own_call_and_nothing_else_does(found):
    worst, trained, others = found["heads"]
    assert worst <= 1e-12 and trained and others == set()


def test_heads_train_as_by_our_own_call_on_two_ranks(found_by_two):
    for rank in found_by_two:
        worst, trained, others = rank["heads"]
        assert worst <= 1e-12 and trained and others == set()


def test_logits_and_policy_gradients_are_those_without_mtp_to_the_bit(found):
    logits, plain_logits, trained, plain = found["with and without"]
    assert torch.equal(logits, plain_logits)
    assert policy(trained).keys() == plain.keys() == nonzero(plain)
    assert all(torch.equal(trained[name], plain[name]) for name in plain)
    assert heads(trained).keys() == nonzero(heads(trained))


def test_a_pass_without_gradients_or_without_training_does_no_mtp_work(found):
    assert found["heads ran"] == {"no gradients": False, "no training": False, "training": True}


def test_verls_normalisation_factor_becomes_the_normalizer(found_by_two):
    for rank in found_by_two:
        assert rank["factor"] <= 1e-12


def test_heads_train_as_by_our_own_call_on_two_pipeline_stages():
    with parallel_world() as groups, fp64_cross_entropy():
        reference = tiny(groups)
        wanted = gradients(reference, groups, 0 * direct(reference, groups).sum())
    for ours in run_ranks(on_two_stages, 2, timeout=120):
        assert worst_difference(heads(ours), heads(wanted))[0] <= 1e-12
        assert nonzero(ours) == nonzero(heads(ours)) != set()


def test_verls_targets_cross_into_the_next_trajectory_after_an_empty_prompt_ours_do_not(found):
    # The last token of 10 … 17 would learn to predict 20, the first of the next trajectory.
    assert found["last target of verl"] == (20, 1.0)
    assert found["last target of ours"] == -100
    assert found["empty prompt"][0] <= 1e-12


def test_empty_prompts_train_as_by_our_own_call_on_two_ranks(found_by_two):
    for rank in found_by_two:
        assert rank["empty prompt"][0] <= 1e-12


def test_verls_own_patch_does_not_fit_the_patched_model(found):
    assert "_megatron_gptmodel_postprocess() got an unexpected keyword argument 'mtp_" in found[
        "own patch"
    ]


def test_metrics_arrive_where_verl_looks_for_them_once(found):
    named, again = found["metrics"]
    assert named["mtp_losses/mtp_1_loss"] > 0 and named["mtp_losses/mtp_accepted_length"] >= 1
    assert named["mtp_losses/mtp_1_supervised_tokens"] == 5 + 6 + 3
    assert named["mtp_losses/mtp_2_supervised_tokens"] == 5 + 5 + 3  # a prompt of two tokens
    assert "mtp_losses/mtp_1_loss" not in again  # nothing has run since: no number, not NaN


def on_one_rank():
    import_client("verl")
    with parallel_world() as groups, fp64_cross_entropy():
        own_patch = with_verls_own_patch(groups)  # first: install() takes it out of the process
        theirs, ours = last_targets(groups)
        return {
            "heads": compare_heads(groups),
            "empty prompt": compare_heads(groups, EMPTY_PROMPT),
            "with and without": with_and_without(groups),
            "heads ran": heads_ran(groups),
            "last target of verl": theirs,
            "last target of ours": ours,
            "own patch": own_patch,
            "metrics": metrics(groups),
        }


def on_two_ranks(layouts):
    import_client("verl")
    found = {}
    for cp, tp in layouts:
        with parallel_world(cp=cp, tp=tp) as groups, fp64_cross_entropy():
            found[cp, tp] = {
                "heads": compare_heads(groups),
                "empty prompt": compare_heads(groups, EMPTY_PROMPT),
                "factor": compare_factor(groups),
            }
    return found


def on_two_stages():
    """Gradients of the whole model after a step of Megatron's schedule over verl's forward."""
    import_client("verl")
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with parallel_world(pp=2) as groups, fp64_cross_entropy():
        model = adapted(tiny(groups))
        model.config.variable_seq_lengths = True
        get_forward_backward_func()(
            forward_step_func=lambda _, stage: (verl(stage)[1], lambda out: (0 * out.sum(), {})),
            data_iterator=iter([]),
            model=[model],
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        return whole_gradients([model], groups)


def verl(model, lengths=TRAJECTORIES, train=True, **arguments):
    """verl's forward: this rank's logits, and the log-probabilities of the whole batch.

    On a pipeline stage before the last, nothing and the stage's output.
    """
    from verl.models.mcore.model_forward import gptmodel_forward_model_engine
    from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_from_logits

    seen = []

    def logits_processor(logits, label):
        seen.append(logits.detach().clone())  # verl's function writes into them
        return {"log_probs": vocab_parallel_log_probs_from_logits(logits, label)}

    answers = [mask[prompt:] for mask, (prompt, _) in zip(masks_of(lengths), lengths)]
    output = gptmodel_forward_model_engine(
        model,
        nested(tokens_of(lengths)),
        {},
        logits_processor=logits_processor,
        logits_processor_args={"label": nested(tokens_of(lengths)), "loss_mask": nested(answers)},
        mtp_enable_train=train,
        **arguments,
    )
    return (seen[0], output["log_probs"].values()) if seen else (None, output)


def adapted(model, enable_train=True):
    """The model as verl's engine gets it: patched by the function that verl calls."""
    from verl.workers.config import MtpConfig
    from verl.workers.engine.megatron import transformer_impl

    from examples.integrations import mtp_verl

    mtp_verl.install()
    model_config = type("HFModelConfig", (), {})()
    model_config.mtp = MtpConfig(enable=True, enable_train=enable_train, detach_encoder=True)
    transformer_impl.patch_engine_mtp([model], model_config)
    return model


def compare_heads(groups, lengths=TRAJECTORIES):
    """Worst difference from our own call; names of heads, and of all else, that train."""
    model = adapted(tiny(groups))
    ours = gradients(model, groups, 0 * verl(model, lengths)[1].sum())
    reference = tiny(groups)
    wanted = gradients(reference, groups, 0 * direct(reference, groups, lengths).sum())
    worst, _ = worst_difference(heads(ours), heads(wanted))
    return worst, nonzero(heads(ours)), nonzero(policy(ours))


def compare_factor(groups):
    model = adapted(tiny(groups, per_token=True))
    _, logprobs = verl(model, mtp_loss_normalization_factor=2.5)
    ours = gradients(model, groups, 0 * logprobs.sum(), average=False)
    reference = tiny(groups, per_token=True)
    output = direct(reference, groups, mtp_loss_normalizer=0.4)
    wanted = gradients(reference, groups, 0 * output.sum(), average=False)
    return worst_difference(heads(ours), heads(wanted))[0]


def with_and_without(groups):
    model, plain = adapted(tiny(groups)), tiny(groups, mtp_num_layers=None)
    (logits, logprobs), (plain_logits, plain_logprobs) = verl(model), verl(plain, train=False)
    trained = gradients(model, groups, -logprobs.sum())
    return logits, plain_logits, trained, gradients(plain, groups, -plain_logprobs.sum())


def heads_ran(groups):
    ran = {}
    cases = {"no gradients": (True, False), "no training": (False, True), "training": (True, True)}
    for name, (enable_train, with_gradients) in cases.items():
        model, calls = adapted(tiny(groups), enable_train), []
        model.mtp.register_forward_hook(lambda *_: calls.append(1))
        with torch.set_grad_enabled(with_gradients):
            verl(model, train=enable_train)
        ran[name] = bool(calls)
    return ran


def last_targets(groups):
    """Label and weight of the first trajectory's last token as verl makes them; ours as passed."""
    from verl.models.mcore.model_forward import _build_mtp_loss_mask_nested
    from verl.models.mcore.util import preprocess_thd_engine

    tokens, totals = tokens_of(EMPTY_PROMPT), [sum(pair) for pair in EMPTY_PROMPT]
    answers = [mask[prompt:] for mask, (prompt, _) in zip(masks_of(EMPTY_PROMPT), EMPTY_PROMPT)]
    mask = _build_mtp_loss_mask_nested(nested(answers), totals, None)
    theirs = [
        preprocess_thd_engine(field, pre_process=True, need_roll=True)[0].flatten()
        for field in (nested(tokens), mask)
    ]
    model, given = tiny(groups), {}
    forward = model.forward
    model.forward = lambda **arguments: given.update(arguments) or forward(**arguments)
    verl(adapted(model), EMPTY_PROMPT)
    last = totals[0] - 1
    return tuple(field[last].item() for field in theirs), given["labels"].flatten()[last].item()


def with_verls_own_patch(groups):
    from verl.utils.megatron_utils import patch_engine_mtp
    from verl.workers.config import MtpConfig

    model, model_config = tiny(groups), type("HFModelConfig", (), {})()
    model_config.mtp = MtpConfig(enable=True, enable_train=True, detach_encoder=True)
    patch_engine_mtp([model], model_config)
    with pytest.raises(TypeError) as refused:
        verl(model)
    return str(refused.value)


def metrics(groups):
    from verl.workers.engine.megatron import transformer_impl

    verl(adapted(tiny(groups)))
    return transformer_impl.get_megatron_mtp_loss(1), transformer_impl.get_megatron_mtp_loss(1)
