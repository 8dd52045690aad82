"""slime 0.3.1 and miles 0.0.2: heads trained by this series, without slime's patch of Megatron.

Copy this file. In ``forward_step`` of ``train_one_step`` (backends/megatron_utils/model.py) replace
``forward_kwargs["mtp_kwargs"] = …`` and its ``if`` by

    forward_kwargs |= mtp_forward_kwargs(args, batch, num_microbatches, step_global_batch_size)

See docs/integrations.md.
"""

from megatron.core import mpu
from megatron.core.transformer.mtp_objective import Targets, prediction_aligned_targets
from megatron.core.transformer.mtp_objective import weigh_microbatches


def mtp_forward_kwargs(args, batch, num_microbatches, step_global_batch_size):
    """Arguments of one microbatch's forward, weighted as slime weighs its own loss."""
    if not args.enable_mtp_training:
        return {"compute_mtp_loss": False}
    cp, dp_cp = mpu.get_context_parallel_group(), mpu.get_data_parallel_group(True)
    if args.allgather_cp and cp.size() > 1:
        raise ValueError("MTP training needs zigzag context parallelism: turn --allgather-cp off.")
    packed, mask = batch.get("packed_seq_params"), batch["full_loss_masks"]  # prediction-aligned
    labels, _ = prediction_aligned_targets(batch["tokens"], mask, packed, cp)
    given = {"labels": labels, "return_logits": True, "mtp_isolated_loss": True}
    if args.calculate_per_token_loss:  # every context-parallel rank counts all tokens of its row
        return given | {"mtp_loss_normalizer": 1 / cp.size()}
    (weighed,) = weigh_microbatches(
        [Targets(labels, mask, packed)], "sequence-mean",
        num_depths=args.mtp_num_layers, cp_group=cp,
    )
    divisor = dp_cp.size() * num_microbatches
    given["mtp_loss_normalizer"] = step_global_batch_size / divisor
    return given | {"loss_mask": weighed.loss_mask}


def slime_name(name):
    """The name by which slime's converters know a parameter of this Megatron."""
    return name.replace(".mtp_model_layer.", ".transformer_layer.")
