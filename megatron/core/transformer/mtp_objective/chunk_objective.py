"""The chunked objective of a model: from its targets and its output layer to a loss.

Shape suffixes: B batch rows, S positions of this context-parallel rank, H hidden size, D depths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Optional, Sequence

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.chunk_checks import (
    check_chunked_head,
    check_chunking_config,
)
from megatron.core.transformer.mtp_objective.chunk_scorer import CrossEntropy, Scorer
from megatron.core.transformer.mtp_objective.chunk_workspace import Head
from megatron.core.transformer.mtp_objective.chunked import DepthRows, chunked_cross_entropy
from megatron.core.transformer.mtp_objective.host_counts import HostCounts
from megatron.core.transformer.mtp_objective.normalization import Normalizer, normalize_depth_loss
from megatron.core.transformer.mtp_objective.targets import DepthTargets

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

ProcessGroup = torch.distributed.ProcessGroup


@dataclass(frozen=True)
class ChunkedLosses:
    """What the objective of one forward came to.

    Attributes:
        objective: this rank's contribution, a scalar whose gradient is that of the objective.
        losses_DBS: what is trained of each depth (the cross-entropy, unless a scorer says
            otherwise), [b, s], without gradient or weights; 0 where nothing counts.
        right_DBS: bool, whether the most likely token is the label; False where nothing counts.
    """

    objective: Tensor
    losses_DBS: Tensor
    right_DBS: Tensor


def chunked_objective(
    hidden_DSBH: Sequence[Tensor],
    targets: DepthTargets,
    counts: HostCounts,
    *,
    output_layer: ColumnParallelLinear,
    output_weight: Optional[Tensor],
    config: TransformerConfig,
    normalizer: Optional[Normalizer] = None,
    tp_group: Optional[ProcessGroup] = None,
    scale_logits_fn: Optional[Callable[[Tensor], Tensor]] = None,
    compute_language_model_loss: Optional[Callable] = None,
    scorer: Optional[Scorer] = None,
) -> ChunkedLosses:
    """The objective of all depths without their logits; see `chunked_cross_entropy`.

    Args:
        hidden_DSBH: per depth, [s, b, h], or [s / tp, b, h] under sequence parallelism.
        targets: labels, masks and counts of this microbatch.
        counts: this rank's supervised rows.
        output_layer: the model's; only its weight is used.
        output_weight: weight in place of its own: a tied one, or a detached one.
        config: chunk size (0: all supervised rows are one chunk), scaling factor, normalization.
        normalizer: see `normalize_depth_loss`.
        tp_group: ranks that share the vocabulary; None takes the output layer's.
        scale_logits_fn, compute_language_model_loss: the model's own, None like the usual one.
        scorer: puts another loss in place of the cross-entropy.

    Raises:
        ValueError: the configuration or the head is one that cannot be chunked, or the hidden
            states do not have the targets' positions.
    """
    check_chunking_config(config)  # Again: a field may have been set since the model was built.
    scorer = CrossEntropy() if scorer is None else scorer
    check_chunked_head(
        output_layer,
        output_weight,
        scale_logits_fn,
        compute_language_model_loss,
        asked=scorer.asked,
        instead=scorer.instead,
    )
    _run_forward_pre_hooks(output_layer, output_weight)
    weight = output_layer.weight if output_weight is None else output_weight
    head = Head(
        weight_VH=weight,
        chunk_size=config.mtp_loss_chunk_size or targets.mask_BS.numel(),
        tp_group=output_layer.tp_group if tp_group is None else tp_group,
        sequence_parallel=output_layer.sequence_parallel,
        logit_scale=1.0 if scale_logits_fn is None else float(config.mup_output_mult),
        fuse_weight_gradient=output_layer.gradient_accumulation_fusion,
    )
    _require_positions(hidden_DSBH[0], targets, head)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    depths = []
    for depth, count in enumerate(counts.read()):
        mask_BS = targets.masks_DBS[depth].to(dtype)
        weights_BS = normalize_depth_loss(mask_BS, depth, targets, config, normalizer)
        depths.append(DepthRows(targets.labels_DBS[depth], weights_BS, count, mask_BS != 0))
    return ChunkedLosses(*chunked_cross_entropy(hidden_DSBH, depths, head, scorer))


def _run_forward_pre_hooks(output_layer: torch.nn.Module, weight: Optional[Tensor]) -> None:
    """What calling the layer would do first: overlapped DDP waits there for its parameters."""
    kwargs = {"weight": weight}
    for hook_id, hook in list(output_layer._forward_pre_hooks.items()):
        if hook_id in output_layer._forward_pre_hooks_with_kwargs:
            hook(output_layer, (), kwargs)
        else:
            hook(output_layer, ())


def _require_positions(hidden_SBH: Tensor, targets: DepthTargets, head: Head) -> None:
    """Raise unless hidden states have a row for every target."""
    ranks = head.tp_size if head.sequence_parallel else 1
    if (hidden_SBH.size(1), hidden_SBH.size(0) * ranks) != tuple(targets.mask_BS.shape):
        raise ValueError(
            f"Hidden states hold {hidden_SBH.size(0)} rows on each of {ranks} tensor-parallel "
            f"rank(s) for {hidden_SBH.size(1)} sequences, labels and loss_mask are "
            f"{tuple(targets.mask_BS.shape)}: pass those of the whole (context-parallel) part of "
            f"the sequence this rank works on."
        )
