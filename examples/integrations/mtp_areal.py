"""AReaL 1.0.4: heads of a Megatron actor trained on the packed trajectories of its own step.

Copy this file and call ``install()`` before AReaL's engine is built. See docs/integrations.md.
"""

from functools import partial, wraps

from areal.engine import megatron_engine
from areal.engine.megatron_utils import packed_context_parallel as packing
from megatron.core import parallel_state as mpu
from megatron.core.transformer import mtp_objective


def install():
    """Put the two functions below where AReaL calls its own."""
    engine = megatron_engine.MegatronEngine
    engine.forward_backward_batch = train_heads(engine.forward_backward_batch)
    megatron_engine.packed_context_parallel_forward = forward


def train_heads(forward_backward_batch):
    """Wrap the engine's method: in training, give every microbatch its MTP arguments."""

    @wraps(forward_backward_batch)
    def wrapped(self, mb_list, process_output_fn, forward_only=False):
        depths = self.model[0].config.mtp_num_layers
        if depths and not forward_only and not self.config.is_critic:
            if self.use_padded_seq or self.is_vision_model or self.enable_tree_training:
                raise ValueError("MTP heads train on packed text: turn them off for this model.")
            cp, dp_cp = mpu.get_context_parallel_group(), mpu.get_data_parallel_group(True)
            targets = [_targets(mb.padded_mb, cp) for mb in mb_list]
            weighed = mtp_objective.weigh_microbatches(
                targets, "token-mean", num_depths=depths, cp_group=cp, dp_cp_group=dp_cp,
                gradient_divisor=dp_cp.size() * len(mb_list),
            )
            for mb, target, weight in zip(mb_list, targets, weighed):
                mb.padded_mb["mtp"] = {"labels": target.labels, **vars(weight)}
        return forward_backward_batch(self, mb_list, process_output_fn, forward_only)

    return wrapped


def forward(model, input_, *args, **kwargs):
    """In place of ``packed_context_parallel_forward``; no MTP work without MTP arguments."""
    mtp = input_.get("mtp")
    given = dict(mtp, return_logits=True, mtp_isolated_loss=True) if mtp else {}
    call = partial(model, compute_mtp_loss=mtp is not None, **given)
    call.vp_stage = getattr(model, "vp_stage", None)
    if mtp:  # AReaL's positions are the whole row's; rotary embeddings and heads need none
        input_ = {**input_, "position_ids": None}
    return packing.packed_context_parallel_forward(call, input_, *args, **kwargs)


def _targets(padded_mb, cp_group):
    split, bounds = packing.preprocess_packed_seqs_context_parallel, padded_mb["cu_seqlens"]
    tokens, packed = split(padded_mb["input_ids"], bounds)
    mask, _ = split(padded_mb["loss_mask"], bounds)
    labels, _ = mtp_objective.prediction_aligned_targets(tokens.long(), mask, packed, cp_group)
    return mtp_objective.Targets(labels, mask, packed)
