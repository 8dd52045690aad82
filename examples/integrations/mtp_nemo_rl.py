"""NeMo-RL 0.7.0: heads trained isolated, on the mask that NeMo-RL computes for them.

Copy this file and call ``install()`` in the Megatron policy worker before it sets up its model.
See docs/integrations.md.
"""

from functools import partial

from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.transformer.mtp_objective import prediction_aligned_targets
from nemo_rl.models.megatron import setup, train

_model_forward, _apply_mtp_config = train.model_forward, setup._apply_mtp_config


def install():
    """Put the two functions below where NeMo-RL calls its own."""
    train.model_forward = model_forward
    setup._apply_mtp_config = apply_mtp_config


def apply_mtp_config(model_cfg, config):
    """Isolate the heads, and weigh every target as ``global_valid_toks`` weighs the policy's."""
    _apply_mtp_config(model_cfg, config)
    model_cfg.mtp_isolated_loss = bool(model_cfg.mtp_num_layers)
    model_cfg.mtp_loss_normalization = "global"  # NeMo-RL's mtp_grad_scale_func divides


def model_forward(
    *, model, input_ids_cp_sharded, packed_seq_params=None, mtp_loss_mask=None, **given
):
    """Heads train where NeMo-RL passes its token-aligned mask; elsewhere no MTP work is done."""
    call = partial(model, compute_mtp_loss=mtp_loss_mask is not None)
    if mtp_loss_mask is not None:
        fused = ("use_linear_ce_fusion_loss", "use_fused_linear_logprobs")  # the later name, too
        if on := [name for name in fused if given.get(name)]:
            raise ValueError(f"Training MTP heads needs logits: turn {on[0]} off.")
        labels, mtp_loss_mask = prediction_aligned_targets(
            input_ids_cp_sharded, mtp_loss_mask, packed_seq_params, get_context_parallel_group()
        )
        call = partial(model, labels=labels, return_logits=True)
    return _model_forward(
        model=call, input_ids_cp_sharded=input_ids_cp_sharded, packed_seq_params=packed_seq_params,
        mtp_loss_mask=mtp_loss_mask, **given,
    )
