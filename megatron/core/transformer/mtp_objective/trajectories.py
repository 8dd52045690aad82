"""From token-aligned masks to what one forward call needs.

RL frameworks keep masks per token ("this token was sampled by the policy"); a language model predicts
the next one. Here the two meet, in one place, and no target ever crosses a sequence boundary:

    tokens       10 11 12 13 | 20 21        token_mask   0  0  1  1 |  0  1
    labels       11 12 13  – | 21  –        loss_mask    0  1  1  0 |  1  0        (– is -100)

Shape suffixes: B batch rows, T local positions, N sequences.
"""

from typing import Optional

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective.checks import (
    require_condition,
    require_mask_like,
    require_token_ids,
)
from megatron.core.transformer.mtp_objective.layout import SequenceLayout
from megatron.core.transformer.mtp_objective.shift import shift_fields
from megatron.core.transformer.mtp_objective.targets import IGNORED_LABEL


def prediction_aligned_targets(
    tokens: Tensor,
    token_mask: Tensor,
    packed_seq_params: Optional[PackedSeqParams] = None,
    cp_group: Optional[torch.distributed.ProcessGroup] = None,
) -> tuple[Tensor, Tensor]:
    """Labels and loss mask for ``forward(labels=..., loss_mask=...)`` from a token-aligned mask.

    Args:
        tokens: int [b, t]; padded rows (BSHD), or [1, t] with ``packed_seq_params`` (THD). Under
            context parallelism this rank's part.
        token_mask: [b, t], bool or number: weight of each token as a prediction target, 0 for
            prompt and padding. A trainer's own gating (positive advantages only, …) is a factor
            of this mask.
        packed_seq_params: sequence boundaries over all CP ranks, for THD.
        cp_group: context-parallel group, when the tensors are one rank's part.

    Returns:
        ``labels`` int64 [b, t], the next token, -100 where the sequence has none; ``loss_mask``
        [b, t] in ``token_mask``'s dtype, the next token's mask, 0 there.

    Raises:
        TypeError: tokens that are not integers, a mask that is not real-valued.
        ValueError: shapes that differ; packed sequences that the row does not hold, or several
            packed rows; lengths that context parallelism cannot split.
    """
    require_token_ids("tokens", tokens)
    require_mask_like("token_mask", token_mask, "tokens", tokens)
    layout = SequenceLayout.of(tokens, packed_seq_params, cp_group)
    if packed_seq_params is not None:
        _require_packed_row(tokens, packed_seq_params, layout.cp_size)
    exists = torch.ones_like(tokens, dtype=torch.bool)
    labels, loss_mask, exists = shift_fields([tokens.long(), token_mask, exists], [1], layout)[0]
    return labels.masked_fill(~exists, IGNORED_LABEL), loss_mask


def _require_packed_row(tokens: Tensor, params: PackedSeqParams, cp_size: int) -> None:
    """Boundaries of more tokens than the row holds mean that ``cp_group`` was forgotten."""
    if tokens.dim() != 2 or tokens.size(0) != 1:
        raise ValueError(f"Packed tokens must be one row [1, t], got {tuple(tokens.shape)}.")
    padded = params.cu_seqlens_q_padded
    last = (params.cu_seqlens_q if padded is None else padded)[-1]
    require_condition(
        last <= tokens.size(1) * cp_size,
        f"The packed sequences end at token {{shown}}, but {cp_size} context-parallel rank(s) with "
        f"{tokens.size(1)} tokens each hold fewer: pass cp_group with one rank's part of a row.",
        last,
    )
