"""The NeMo-RL adapter against the two functions of NeMo-RL 0.7.0 that it wraps.

NeMo-RL is not on PyPI, so it is not driven: stand-ins with the signatures of `model_forward` and
`_apply_mtp_config`, and with their calls, take its place.

    python -m pytest tests/examples/test_integrations_nemo_rl.py
"""

import sys
import types

import pytest
import torch

from tests.examples.integration_support import direct, gradients, heads, masks_of, policy, tiny
from tests.examples.integration_support import tokens_of
from tests.support import (
    fp64_cross_entropy,
    grads_by_name,
    parallel_world,
    prepare,
    run_ranks,
    worst_difference,
)
from tests.support.objective import nonzero
from tests.support.rows import packed_seq_params
from tests.support.sharding import shard

prepare()

STEP = ((3, 5), (2, 6), (4, 4), (1, 7))
VALID_TOKENS = sum(answer for _, answer in STEP)


@pytest.mark.parametrize("cp", [1, 2])
def test_two_microbatches_weigh_every_target_by_the_global_valid_tokens(cp):
    for ours, wanted in run_ranks(train_and_compare, cp, cp):
        assert worst_difference(heads(ours), heads(wanted))[0] <= 1e-7  # a float32 scale
        assert nonzero(ours) == nonzero(heads(ours)) != set()


def test_without_a_mask_no_head_runs_and_fused_losses_are_refused():
    ((ran, messages),) = run_ranks(skip_and_refuse, 1)
    assert not ran
    assert [f"turn {name} off" in said for name, said in messages.items()] == [True, True]


def test_the_config_isolates_heads_only_where_there_are_some():
    assert run_ranks(configure, 1) == [[(2, True, "global"), (None, False, "global")]]


def nemo_rl():
    """Put the stand-ins in place and install the adapter; returns NeMo-RL's two modules."""
    setup, train = types.ModuleType("setup"), types.ModuleType("train")

    def model_forward(
        model,
        data_dict,
        input_ids_cp_sharded,
        position_ids,
        attention_mask,
        packed_seq_params=None,
        defer_fp32_logits=False,
        mtp_loss_mask=None,
        straggler_timer=None,
        use_linear_ce_fusion_loss=False,
    ):
        more = {} if mtp_loss_mask is None else {"loss_mask": mtp_loss_mask}
        if packed_seq_params is not None:
            more["packed_seq_params"] = packed_seq_params
        return model(
            input_ids=input_ids_cp_sharded,
            position_ids=position_ids,
            attention_mask=attention_mask,
            **more,
        )

    def _apply_mtp_config(model_cfg, config):
        model_cfg.mtp_num_layers = config["megatron_cfg"]["mtp_num_layers"]

    train.model_forward, setup._apply_mtp_config = model_forward, _apply_mtp_config
    parent = types.ModuleType("nemo_rl.models.megatron")
    parent.setup, parent.train = setup, train
    for name in ("nemo_rl", "nemo_rl.models"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["nemo_rl.models.megatron"] = parent
    from examples.integrations import mtp_nemo_rl

    mtp_nemo_rl.install()
    return setup, train


def microbatch(groups, chosen):
    """Arguments of one forward as NeMo-RL packs them: trajectories of 8 tokens back to back."""
    tokens = torch.cat([tokens_of(STEP)[i] for i in chosen])
    mask = torch.cat([masks_of(STEP)[i] for i in chosen])
    bounds = list(range(0, tokens.numel() + 1, 8))
    cp, rank = groups.cp.size(), groups.cp.rank()
    part = [shard(field[None], cp, rank, bounds) for field in (tokens, mask)]
    return dict(
        data_dict={},
        input_ids_cp_sharded=part[0],
        position_ids=None,
        attention_mask=None,
        packed_seq_params=packed_seq_params(bounds, bounds),
        mtp_loss_mask=part[1],
    )


def train_and_compare(cp):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    _, train = nemo_rl()
    with parallel_world(cp=cp) as groups, fp64_cross_entropy():
        as_configured = dict(mtp_loss_normalization="global", mtp_isolated_loss=True)
        model = tiny(groups, per_token=True, **as_configured)
        model.config.mtp_grad_scale_func = lambda: torch.tensor(1.0 / VALID_TOKENS)

        def forward_step(batches, model):
            logits = train.model_forward(model=model, **next(batches))
            return logits, lambda output: (0 * output.sum(), {})

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([microbatch(groups, pair) for pair in ((0, 1), (2, 3))]),
            model=[model],
            num_microbatches=2,
            seq_length=16,
            micro_batch_size=1,
            forward_only=False,
        )
        ours = summed(model, groups)
        model.config.mtp_grad_scale_func = None
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
        reference = tiny(groups)
        output = direct(reference, groups, STEP, mtp_loss_normalizer=VALID_TOKENS)
        return ours, gradients(reference, groups, 0 * output.sum(), average=False)


def summed(model, groups):
    """Gradients added up over context-parallel ranks, as DDP does with per-token loss."""
    named = grads_by_name(model)
    for gradient in named.values():
        torch.distributed.all_reduce(gradient, group=groups.dp_cp)
    return named


def skip_and_refuse():
    _, train = nemo_rl()
    with parallel_world() as groups:
        model, calls = tiny(groups), []
        model.mtp.register_forward_hook(lambda *_: calls.append(1))
        batch = microbatch(groups, (0, 1))
        train.model_forward(model=model, **{**batch, "mtp_loss_mask": None})
        messages = {}
        for name in ("use_linear_ce_fusion_loss", "use_fused_linear_logprobs"):
            with pytest.raises(ValueError) as refused:
                train.model_forward(model=model, **batch, **{name: True})
            messages[name] = str(refused.value)
        return bool(calls), messages


def configure():
    setup, _ = nemo_rl()
    found = []
    for depths in (2, None):
        config = types.SimpleNamespace()
        setup._apply_mtp_config(config, {"megatron_cfg": {"mtp_num_layers": depths}})
        names = ("mtp_num_layers", "mtp_isolated_loss", "mtp_loss_normalization")
        found.append(tuple(getattr(config, name) for name in names))
    return found
