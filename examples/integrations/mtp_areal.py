"""AReaL 1.0.4: heads of a Megatron actor trained on the packed trajectories of its own step.

Copy this file and call ``install()`` before AReaL's engine is built. See docs/integrations.md.
"""

from functools import partial, wraps

from areal.engine import megatron_engine
from areal.engine.megatron_utils.packed_context_parallel import (
    packed_context_parallel_forward,
    preprocess_packed_seqs_context_parallel,
)
from megatron.core import parallel_state as mpu
from megatron.core.transformer.mtp_objective import Targets, prediction_aligned_targets
from megatron.core.transformer.mtp_objective import weigh_microbatches


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
            cp, dp_cp = mpu.get_context_parallel_group(), mpu.get_data_parallel_group(True)
            targets = [_targets(mb.padded_mb, cp) for mb in mb_list]
            weighed = weigh_microbatches(
                targets, "token-mean", num_depths=depths, cp_group=cp, dp_cp_group=dp_cp,
                gradient_divisor=dp_cp.size() * len(mb_list),
            )
            for mb, target, weight in zip(mb_list, targets, weighed):
                mb.padded_mb["mtp"] = {"labels": target.labels, **vars(weight)}
        return forward_backward_batch(self, mb_list, process_output_fn, forward_only)

    return wrapped


def forward(model, input_, *args, **kwargs):
    """In place of ``packed_context_parallel_forward``; without MTP arguments no MTP work is done."""
    mtp = input_.get("mtp")
    given = dict(mtp, return_logits=True, mtp_isolated_loss=True) if mtp else {}
    call = partial(model, compute_mtp_loss=mtp is not None, **given)
    call.vp_stage = getattr(model, "vp_stage", None)
    # Positions are the whole row's, also under context parallelism; rotary ones need none.
    return packed_context_parallel_forward(call, {**input_, "position_ids": None}, *args, **kwargs)


def _targets(padded_mb, cp_group):
    tokens, packed = preprocess_packed_seqs_context_parallel(
        padded_mb["input_ids"], padded_mb["cu_seqlens"]
    )
    mask, _ = preprocess_packed_seqs_context_parallel(
        padded_mb["loss_mask"], padded_mb["cu_seqlens"]
    )
    labels, _ = prediction_aligned_targets(tokens.long(), mask, packed, cp_group)
    return Targets(labels, mask, packed)
