"""What the configuration says about the objective: its fields checked, and put together.

``mtp_objective`` is "ce", "kl", "tv", "ce+kl" or "ce+tv"; `divergences` has the formulas. The
policy is needed as a teacher for all but "ce", for ``mtp_depth_weighting="chained"`` and for
``mtp_expected_acceptance``. Then supervised rows alone are projected, in chunks of
``mtp_loss_chunk_size`` rows or, with 0, in one chunk.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.mtp_objective.chunk_checks import (
    check_model_head,
    computes_objective,
)
from megatron.core.transformer.mtp_objective.divergences import Divergence
from megatron.core.transformer.mtp_objective.sampling import TeacherSampling

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.transformer_config import TransformerConfig

OBJECTIVES = ("ce", "kl", "tv", "ce+kl", "ce+tv")
DEPTH_WEIGHTINGS = ("uniform", "chained")
SMALLEST_TEMPERATURE = 1e-4
"""Gradients are divided by T, and float16 holds nothing above 65504."""

_TEACHER_FIELDS = dict(
    mtp_teacher_temperature=1.0, mtp_teacher_top_k=0, mtp_teacher_top_p=1.0
)
ASKED = (
    "An objective with the policy as teacher (mtp_objective other than 'ce', "
    "mtp_depth_weighting='chained' or mtp_expected_acceptance)"
)
WITHOUT_TEACHER = (
    "set mtp_objective='ce', mtp_depth_weighting='uniform' and mtp_expected_acceptance=False."
)


def needs_teacher(config: TransformerConfig) -> bool:
    """Whether the policy's distribution is computed beside the heads'."""
    return (
        config.mtp_objective != "ce"
        or config.mtp_depth_weighting == "chained"
        or config.mtp_expected_acceptance
    )


def divergence_of(config: TransformerConfig) -> Divergence:
    """What the configuration trains."""
    kind = config.mtp_objective.removeprefix("ce").removeprefix("+") or None
    return Divergence(
        with_labels=config.mtp_objective.startswith("ce"),
        kind=kind,
        weight=float(config.mtp_objective_weight),
        sampling=TeacherSampling(
            float(config.mtp_teacher_temperature),
            config.mtp_teacher_top_k,
            float(config.mtp_teacher_top_p),
        ),
    )


def check_objective_config(config: TransformerConfig) -> None:
    """Refuse an objective that is unknown or cannot work, when a model is configured.

    Raises:
        ValueError: which field, what was expected, what came and what to change; or a teacher is
            asked for where there are no heads.
    """
    for name, known in (
        ("mtp_objective", OBJECTIVES),
        ("mtp_depth_weighting", DEPTH_WEIGHTINGS),
    ):
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}.")
    _check_sampling(config)
    _check_weights(config)
    if needs_teacher(config) and not config.mtp_num_layers:
        raise ValueError(
            f"{ASKED} is for MTP heads, but mtp_num_layers is {config.mtp_num_layers}: set "
            f"mtp_num_layers, or {WITHOUT_TEACHER}"
        )
    if needs_teacher(config) and config.defer_embedding_wgrad_compute:
        raise ValueError(
            f"{ASKED} computes the output weight's gradient in forward, and "
            "defer_embedding_wgrad_compute keeps activations to compute it later: "
            f"unset that, or {WITHOUT_TEACHER}"
        )


def check_teacher_model(model: LanguageModule) -> None:
    """Refuse a model that the policy cannot be computed of as a teacher, when it is built.

    What wraps or replaces its parts later (adapters, FSDP) is found by the first forward.

    Args:
        model: GPTModel or HybridModel, with its output layer.

    Raises:
        ValueError: a top-k larger than the (padded) vocabulary, or what `check_chunked_head`
            refuses, and what to change.
    """
    config = model.config
    if config.mtp_teacher_top_k > model.vocab_size:
        raise ValueError(
            f"mtp_teacher_top_k must not exceed the vocabulary of {model.vocab_size}, got "
            f"{config.mtp_teacher_top_k}: lower it, or set 0 to keep every token."
        )
    if needs_teacher(config) and computes_objective(model):
        check_model_head(model, ASKED, WITHOUT_TEACHER)


def _check_sampling(config: TransformerConfig) -> None:
    temperature, top_p = config.mtp_teacher_temperature, config.mtp_teacher_top_p
    top_k = config.mtp_teacher_top_k
    if not (_is_real(temperature) and SMALLEST_TEMPERATURE <= temperature < math.inf):
        raise ValueError(
            f"mtp_teacher_temperature must be finite and at least {SMALLEST_TEMPERATURE}, got "
            f"{temperature!r}: set the rollout's; for greedy rollouts a small one, such as 0.01."
        )
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0:
        raise ValueError(
            f"mtp_teacher_top_k must be an integer ≥ 0 (0: every token), got {top_k!r}: engines "
            f"that write -1 for every token mean 0 here."
        )
    if not (_is_real(top_p) and 0 < top_p <= 1):
        raise ValueError(
            f"mtp_teacher_top_p must be greater than 0 and at most 1 (1: every token), "
            f"got {top_p!r}."
        )
    if needs_teacher(config):
        return
    for name, default in _TEACHER_FIELDS.items():
        if getattr(config, name) != default:
            raise ValueError(
                f"{name}={getattr(config, name)!r} has no effect: mtp_objective='ce' with uniform "
                f"depth weighting asks no teacher. Choose another mtp_objective, set "
                f"mtp_expected_acceptance=True to measure with it, or leave {name} at {default}."
            )


def _check_weights(config: TransformerConfig) -> None:
    weight, weights_D = config.mtp_objective_weight, config.mtp_depth_weights
    if not (_is_real(weight) and 0 <= weight < math.inf):
        raise ValueError(
            f"mtp_objective_weight must be finite and at least 0, got {weight!r}: it multiplies "
            f"the second term of 'ce+kl' and 'ce+tv'."
        )
    if weight != 1 and "+" not in config.mtp_objective:
        raise ValueError(
            f"mtp_objective_weight={weight!r} has no effect with "
            f"mtp_objective={config.mtp_objective!r}: it multiplies the second term of 'ce+kl' and "
            f"'ce+tv'. Use mtp_loss_scaling_factor to weigh the whole objective."
        )
    if weights_D is None:
        return
    depths = config.mtp_num_layers or 0
    right = isinstance(weights_D, (list, tuple)) and len(weights_D) == depths > 0
    if not right or not all(_is_real(w) and 0 <= w < math.inf for w in weights_D):
        raise ValueError(
            f"mtp_depth_weights must hold one finite number ≥ 0 for each of the {depths} MTP "
            f"depths (mtp_num_layers), got {weights_D!r}."
        )
    if not any(weights_D):
        raise ValueError(
            "mtp_depth_weights must not all be 0: then nothing trains. Set "
            "mtp_loss_scaling_factor=0 to switch the objective off."
        )


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
