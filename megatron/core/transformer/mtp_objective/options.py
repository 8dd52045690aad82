"""What one forward call asks of the MTP objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.isolation import is_isolated
from megatron.core.transformer.mtp_objective.normalization import (
    Normalizer,
    check_normalization_config,
    require_normalizer,
)

if TYPE_CHECKING:
    from megatron.core.transformer.mtp_objective.plan import DepthPlan
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class MTPOptions:
    """The resolved keyword arguments of a model's forward pass.

    Attributes:
        active: whether the MTP block and the objective run at all.
        isolated: whether the objective is cut off from everything but the heads.
        return_logits: return logits although labels are given.
        normalizer: denominator of the objective instead of the configured one.
        plan: shifted fields of every depth, made where forward starts; None: each user makes its
            own.
        wanted: whether MTP is active wherever there are heads: as ``active``, but for the stage.
    """

    active: bool
    isolated: bool
    return_logits: bool = False
    normalizer: Optional[Normalizer] = None
    plan: Optional[DepthPlan] = None
    wanted: bool = False

    @classmethod
    def resolve(
        cls,
        config: TransformerConfig,
        *,
        has_heads: bool,
        training: bool,
        labels: Optional[Tensor],
        return_logits: bool = False,
        mtp_isolated_loss: Optional[bool] = None,
        compute_mtp_loss: bool = True,
        mtp_loss_normalizer: Optional[Normalizer] = None,
        output_processor: Any = None,
    ) -> MTPOptions:
        """Decide from the call and the configuration.

        MTP does no work whose result cannot be used: there are no heads, gradients are disabled,
        the caller or a scaling factor of 0 switches it off, or a model in eval mode is asked for
        logits only. The last does not count where the heads have a pipeline stage to themselves:
        that stage may not see the labels, and must decide as the stage with the loss does.

        Args:
            config: the model's configuration.
            has_heads: whether this stage, or one before it, holds an MTP block.
            training: ``model.training``.
            labels: the labels of the call, or None.
            return_logits: see the attribute.
            mtp_isolated_loss: overrides the configuration for this call; None follows it.
            compute_mtp_loss: False switches MTP off for this call.
            mtp_loss_normalizer: see ``require_normalizer``.
            output_processor: the call's output hook, which replaces the returned value.

        Raises:
            ValueError: ``return_logits`` together with ``output_processor``; a bad or missing
                normalizer.
            TypeError: a normalizer of the wrong type.
        """
        if return_logits and output_processor is not None:
            raise ValueError(
                "return_logits=True and output_processor both decide what forward returns: "
                "got both; drop return_logits and return the logits from the output_processor, "
                "or drop the output_processor."
            )
        wanted = bool(
            config.mtp_loss_scaling_factor
            and compute_mtp_loss
            and torch.is_grad_enabled()
            and (training or labels is not None or config.mtp_standalone)
        )
        active = bool(has_heads and wanted)
        if active:
            check_normalization_config(config)
            require_normalizer(mtp_loss_normalizer, config)
        return cls(
            active=active,
            isolated=is_isolated(config, mtp_isolated_loss),
            return_logits=return_logits,
            normalizer=mtp_loss_normalizer,
            wanted=wanted,
        )
