"""verl 0.9.1: heads trained by this series, not by verl's own replacement of Megatron's methods.

Copy this file and call ``install()`` before verl's engine is built. See docs/integrations.md.
"""

from functools import partial

from megatron.core.transformer.mtp_objective import prediction_aligned_targets
from megatron.core.transformer.mtp_objective.metrics import mtp_metrics
from verl.models.mcore import mtp_patch
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron import transformer_impl


def install():
    """Put the two functions below where verl calls its own."""
    transformer_impl.patch_engine_mtp = patch_engine_mtp
    mtp_patch.patch_postprocess = lambda model: None  # verl's copy does not know this Megatron


def patch_engine_mtp(module, model_config):
    """Pass what verl asks for to each pipeline chunk's forward; ``module``: the list of chunks."""
    for chunk in module if isinstance(module, list) else [module]:
        model = unwrap_model(chunk)
        model = getattr(model, "language_model", model)
        model.forward = partial(_forward, model, model.forward, model_config.mtp)
    transformer_impl.get_megatron_mtp_loss = partial(_metrics, module)


def _forward(model, forward, mtp, *, labels=None, packed_seq_params=None, **given):
    factor = getattr(packed_seq_params, mtp_patch._MTP_LOSS_NORMALIZATION_FACTOR_ATTR, None)
    if labels is not None:  # verl's labels roll on into the next sequence: -100 where one ends
        labels, _ = prediction_aligned_targets(
            given["input_ids"], given["loss_mask"], packed_seq_params, model.pg_collection.cp
        )
    return forward(
        labels=labels,
        packed_seq_params=packed_seq_params,
        return_logits=labels is not None,
        compute_mtp_loss=mtp.enable_train,
        mtp_isolated_loss=mtp.detach_encoder or None,
        mtp_loss_normalizer=None if factor is None else 1 / factor,
        **given,
    )


def _metrics(module, num_microbatches):
    metrics = mtp_metrics(module)
    named = {} if metrics is None else metrics.as_dict(prefix="mtp")
    return {f"mtp_losses/{name}": value for name, value in named.items() if value == value}
