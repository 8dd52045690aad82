"""What the tests of the adapters share: trajectories, a tiny model, and our own direct call."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from tests.support import (
    ModelSpec,
    all_reduce_gradients,
    build_model,
    device,
    grads_by_name,
    is_mtp_param,
)

# Prompt and answer lengths; token j of trajectory i is 10 (i + 1) + j.
TRAJECTORIES = ((3, 5), (2, 6), (4, 3))


def tokens_of(lengths: Sequence[tuple[int, int]] = TRAJECTORIES) -> list[torch.Tensor]:
    """The tokens of every trajectory, prompt and answer, int64."""
    return [
        torch.arange(prompt + answer, device=device()) + 10 * (i + 1)
        for i, (prompt, answer) in enumerate(lengths)
    ]


def masks_of(lengths: Sequence[tuple[int, int]] = TRAJECTORIES) -> list[torch.Tensor]:
    """1 where a token was sampled, float32."""
    return [
        torch.tensor([0.0] * prompt + [1.0] * answer, device=device()) for prompt, answer in lengths
    ]


def nested(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A jagged nested tensor."""
    return torch.nested.nested_tensor(list(tensors), layout=torch.jagged)


def tiny(
    groups: Any, per_token: bool = False, dtype: torch.dtype = torch.float64, **overrides: Any
) -> torch.nn.Module:
    """An untied model with two depths; the same weights every time."""
    return build_model(ModelSpec(per_token=per_token, dtype=dtype, overrides=overrides), groups)


def direct(model, groups, lengths=TRAJECTORIES, **forward: Any) -> torch.Tensor:
    """Logits of the documented call on this rank's part of the trajectories."""
    from megatron.core.transformer.mtp_objective import pack_trajectories

    batch = pack_trajectories(
        tokens_of(lengths),
        masks_of(lengths),
        cp_size=groups.cp.size(),
        cp_rank=groups.cp.rank(),
        pad_to_multiple=groups.tp.size(),
    )
    given = dict(loss_mask=batch.loss_mask, return_logits=True, mtp_isolated_loss=True)
    return model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
        **{**given, **forward},
    )


def gradients(model, groups, loss: torch.Tensor, average: bool = True) -> dict[str, torch.Tensor]:
    """Gradients after backward, averaged over the data- and context-parallel ranks as DDP does."""
    loss.backward()
    all_reduce_gradients(model, groups.dp_cp, average=average)
    return grads_by_name(model)


def heads(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of the heads."""
    return {name: gradient for name, gradient in named.items() if is_mtp_param(name)}


def policy(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of everything else."""
    return {name: gradient for name, gradient in named.items() if not is_mtp_param(name)}
