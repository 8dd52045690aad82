"""The draft steps of an engine, made with transformers' own layer.

Teacher-forced: step k at position t reads token t + k of the text, where an engine reads its draft.
Positions count up with the steps, as in both engines (vLLM: v1/spec_decode/llm_base_proposer.py,
SGLang: srt/speculative/eagle_worker.py).

B: batch, S: sequence, L: rows of several steps, H: hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.mtp_checkpoint.reference import ReferenceHead, Routing

Steps = list[tuple[Tensor, "Routing | None"]]


def trained_chain(
    reference: ReferenceHead,
    token_ids_BS: Tensor,
    position_ids_BS: Tensor,
    hidden_BSH: Tensor,
    depths: int,
    engine: str,
) -> Steps:
    """Each step attends to the same step of earlier positions, as Megatron's depths do in training.

    Args:
        reference: The head.
        token_ids_BS, position_ids_BS: int64.
        hidden_BSH: The target's hidden states after its final norm.
        depths: Steps.
        engine: Whose way of feeding hidden states back.

    Returns:
        For each step, hidden states after the closing norm [B, S, H], and the router's choice.
    """
    length = token_ids_BS.shape[1]
    causal_SS = torch.ones(length, length, dtype=torch.bool).tril()
    steps: Steps = []
    for ahead in range(1, depths + 1):
        x_BSH = reference.joined(token_ids_BS, hidden_BSH, ahead)
        x_BSH, routing = reference.run_layer(x_BSH, position_ids_BS + ahead - 1, causal_SS)
        steps.append((reference.norm(x_BSH), routing))
        hidden_BSH = x_BSH if engine in reference.fed_back_before_norm else steps[-1][0]
    return steps


def served_chain(
    reference: ReferenceHead,
    token_ids_BS: Tensor,
    position_ids_BS: Tensor,
    hidden_BSH: Tensor,
    depths: int,
    engine: str,
) -> list[Tensor]:
    """Each step attends to what an engine's cache holds: step 1 of all positions up to t, made from
    the target's own states, and the steps so far at t.

    Arguments as for `trained_chain`. Step 1 is the same.

    Returns:
        For each step, hidden states after the closing norm [B, S, H].
    """
    length = token_ids_BS.shape[1]
    causal_SS = torch.ones(length, length, dtype=torch.bool).tril()
    own_SS = torch.eye(length, dtype=torch.bool)
    inputs, positions, states = [], [], []
    for ahead in range(1, depths + 1):
        inputs.append(reference.joined(token_ids_BS, hidden_BSH, ahead))
        positions.append(position_ids_BS + ahead - 1)
        # Rows of all steps side by side; those of earlier steps come out as they did before.
        rows = []
        for step in range(1, ahead + 1):
            later = [own_SS if 1 < other <= step else 0 * own_SS for other in range(2, ahead + 1)]
            rows.append(torch.cat([causal_SS, *later], dim=1))
        may_attend_LL = torch.cat(rows).bool()
        x_BLH, _ = reference.run_layer(
            torch.cat(inputs, dim=1), torch.cat(positions, dim=1), may_attend_LL
        )
        x_BSH = x_BLH[:, -length:]
        states.append(reference.norm(x_BSH))
        hidden_BSH = x_BSH if engine in reference.fed_back_before_norm else states[-1]
    return states
