"""Run the head on a microbatch and score it with this project's objective.

Shape suffixes: B samples, S positions, H hidden size, V vocabulary.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from examples.finetune_mtp_head.batch import Batch
from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.target import FrozenTarget
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.mtp_objective.feedback import feeds_back_pre_norm
from megatron.core.transformer.mtp_objective.metrics import MetricSums
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    process_mtp_loss,
)
from megatron.core.transformer.transformer_config import TransformerConfig


class Objective:
    """Hard-label cross-entropy of the head, with the frozen model's embedding and output layer.

    Args:
        config: the head's.
        target: the frozen model.
        layer: the module whose ``hnorm`` is the first to see the hidden states, and whose
            ``final_layernorm`` is the last.
        groups: process groups.
        dtype: in which the head computes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        target: FrozenTarget,
        layer: torch.nn.Module,
        groups: ProcessGroupCollection,
        dtype: torch.dtype,
    ) -> None:
        self.config = copy.copy(config)
        self.config.mtp_loss_scaling_factor = 1.0  # the only objective there is
        self.target = target
        self._groups, self._dtype = groups, dtype
        self.output_weight_VH = target.output_weight_VH.detach().to(dtype)
        self._entered: list[Tensor] = []
        self._fed_back: list[Tensor] = []  # by each depth, if the next one reads the right states
        layer.hnorm.register_forward_pre_hook(lambda _, args: self._entered.append(args[0]))
        is_pre_norm = feeds_back_pre_norm(config)
        layer.final_layernorm.register_forward_hook(
            lambda _, args, output: self._fed_back.append(args[0] if is_pre_norm else output)
        )

    def head_hidden(
        self, head: Callable[..., Tensor], batch: Batch, hidden_BSH: Tensor
    ) -> Tensor:
        """The head's output before the output layer, depth by depth, [k·s, b, h].

        Args:
            head: the layer, in whatever wrapper.
            batch: its tokens.
            hidden_BSH: what the frozen model's final norm put out.

        Raises:
            FinetuneError: what entered the layer is not what the norm put out in the latest
                forward of the target, bit for bit; or what enters a later depth is not what the
                one before is to hand on.
        """
        self._entered.clear()
        self._fed_back.clear()
        output_SBH = head(
            batch.tokens_BS, batch.positions_BS, hidden_BSH.transpose(0, 1), self.target.embed
        )
        wanted_SBH = self.target.norm_output_BSH.transpose(0, 1).to(self._dtype)
        try:
            if not self._entered or not torch.equal(self._entered[0], wanted_SBH):
                raise FinetuneError(
                    "what enters the MTP layer is not the output of the model's final norm"
                )
            self._check_chain()
        finally:
            self._entered.clear()
            self._fed_back.clear()
        return output_SBH

    def _check_chain(self) -> None:
        depths = self.config.mtp_num_layers
        pairs = list(zip(self._entered[1:], self._fed_back))
        if len(self._entered) != depths or not all(torch.equal(*pair) for pair in pairs):
            raise FinetuneError(
                f"the head's {depths} depths do not read the {self.config.mtp_hidden_feedback} "
                "states of the depth before"
            )

    def backward(
        self,
        head: Callable[..., Tensor],
        batch: Batch,
        hidden_BSH: Tensor,
        normalizer: Tensor,
        sums: MetricSums,
    ) -> None:
        """Add the gradient of the depths' mean of Σ CE / normalizer over the microbatch's targets.

        Args:
            head, batch, hidden_BSH: see `head_hidden`.
            normalizer: > 0, scalar or one value for each depth.
            sums: gets the microbatch's loss and hits.
        """
        head_SBH = self.head_hidden(head, batch, hidden_BSH)
        # Upstream splits its input into the model's own states and those of each depth. Ours end
        # here: their place is taken by zeros, through which the objective's backward is started.
        anchor_SBH = torch.zeros_like(head_SBH[: len(head_SBH) // self.config.mtp_num_layers])
        carrier_SBH = process_mtp_loss(
            hidden_states=torch.cat([anchor_SBH, head_SBH]),
            labels=batch.labels_BS,
            loss_mask=batch.loss_mask_BS,
            output_layer=self._logits,
            output_weight=self.output_weight_VH,
            runtime_gather_output=None,
            is_training=True,
            compute_language_model_loss=self._cross_entropy,
            config=self.config,
            cp_group=self._groups.cp,
            tp_group=self._groups.tp,
            input_ids=batch.tokens_BS,
            mtp_loss_normalizer=normalizer,
            mtp_metric_sums=sums,
        )
        carrier_SBH.backward(anchor_SBH)
        MTPLossLoggingHelper.clean_metrics_in_tracker()  # it is the process's; ours are in `sums`

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., v] of [..., h]."""
        return torch.nn.functional.linear(hidden, self.output_weight_VH)

    def _logits(self, hidden_SBH: Tensor, weight: Tensor, runtime_gather_output: bool | None):
        """The call that upstream makes on an output layer."""
        return torch.nn.functional.linear(hidden_SBH, weight), None

    def _cross_entropy(self, labels_BS: Tensor, logits_SBV: Tensor) -> Tensor:
        labels_SB = labels_BS.transpose(0, 1).contiguous()
        loss_SB = vocab_parallel_cross_entropy(logits_SBV, labels_SB, tp_group=self._groups.tp)
        return loss_SB.transpose(0, 1).contiguous()
