"""Two heads on the same rows: hidden states, router choices, cross entropies.

Row: a position with a target, so all but the last two of a sequence. B: batch, S: sequence,
H: hidden size, E: experts, N: rows, V: vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from tools.mtp_checkpoint.native.layer import NativeHead
from tools.mtp_checkpoint.reference import ReferenceHead, Routing
from tools.mtp_checkpoint.verify_rows import Rows


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came out, one value per row.

    Attributes:
        delta_N: Largest difference of a row's hidden state, over its H numbers.
        scale: Root mean square of the reference's hidden states.
        flipped_N: Whether the two heads chose different experts. Such a row may differ by any
            amount for the smallest difference of its router's logits: it counts apart.
        gap_N: Between the last logit chosen and the first one not, in the reference; inf in a
            dense head.
        native_ce_N: Cross entropy of the native head, by Megatron, in nats.
        recomputed_ce_N: The same logits, by ``torch.nn.functional.cross_entropy`` in float64.
        reference_ce_N: Of the reference head, float64.
        same_argmax_N: Whether both heads' best tokens are the same.
        pre_norm_ce: Mean cross entropy of the native head if it is fed the hidden states before
            the target's final norm; None without them.
    """

    delta_N: Tensor
    scale: float
    flipped_N: Tensor
    gap_N: Tensor
    native_ce_N: Tensor
    recomputed_ce_N: Tensor
    reference_ce_N: Tensor
    same_argmax_N: Tensor
    pre_norm_ce: float | None

    @property
    def hidden_delta(self) -> float:
        """Largest difference over the rows whose routers agree; inf if there is none."""
        agreeing_N = self.delta_N[~self.flipped_N]
        if agreeing_N.numel() == 0 or not agreeing_N.isfinite().all():
            return float("inf")
        return agreeing_N.max().item()

    @property
    def argmax_agreement(self) -> float:
        """Share of the rows whose routers agree on which both heads prefer the same token."""
        agreeing_N = self.same_argmax_N[~self.flipped_N]
        return agreeing_N.double().mean().item() if agreeing_N.numel() else 0.0

    def flips_beyond(self, tie_gap: float) -> int:
        """Rows with different experts where the reference's logits were further apart."""
        return int((self.flipped_N & (self.gap_N > tie_gap)).sum())

    def mean_ce(self, name: str) -> float:
        """Mean over the rows whose routers agree of ``{name}_ce_N``, in float64."""
        return getattr(self, f"{name}_ce_N").double()[~self.flipped_N].mean().item()

    def ce_difference(self, name: str) -> float:
        """Relative difference of the native mean cross entropy from ``name``'s."""
        other = self.mean_ce(name)
        return abs(self.mean_ce("native") - other) / abs(other)


def compare(head: NativeHead, reference: ReferenceHead, rows: Rows) -> Comparison:
    """Run both heads on ``rows`` and compare; needs an expert-parallel size of 1.

    The reference runs on the CPU, the native head wherever it is.
    """
    with torch.no_grad():
        native_BSH, chosen_BSE = run_native(head, reference, rows, rows.hidden_BSH)[0]
        want_BSH, routing = reference(rows.token_ids_BS, rows.position_ids_BS, rows.hidden_BSH)
        flipped_BS, gap_BS = router_flips(chosen_BSE, routing, want_BSH)
        device = _device(head)
        native = _Scores.of(native_BSH, rows, reference, device)
        wanted = _Scores.of(want_BSH, rows, reference, device)
        pre_norm_ce = None
        if rows.pre_norm_BSH is not None:
            wrong_BSH, _ = run_native(head, reference, rows, rows.pre_norm_BSH)[0]
            pre_norm_ce = _Scores.of(wrong_BSH, rows, reference, device).exact_N.mean().item()
    return Comparison(
        delta_N=_rows(native_BSH - want_BSH).abs().amax(-1),
        scale=_rows(want_BSH).square().mean().sqrt().item(),
        flipped_N=_rows(flipped_BS),
        gap_N=_rows(gap_BS),
        native_ce_N=native.megatron_N,
        recomputed_ce_N=native.exact_N,
        reference_ce_N=wanted.exact_N,
        same_argmax_N=native.argmax_N == wanted.argmax_N,
        pre_norm_ce=pre_norm_ce,
    )


def run_native(
    head: NativeHead, reference: ReferenceHead, rows: Rows, hidden_BSH: Tensor
) -> list[tuple[Tensor, Tensor | None]]:
    """The native head's hidden states [B, S, H], and its choice of experts [B, S, E] or None.

    A pair for each depth, on the CPU.
    """
    device, chosen = _device(head), []
    router = getattr(head.mtp.layers[0].mtp_model_layer.mlp, "router", None)
    hook = None
    if router is not None:
        hook = router.register_forward_hook(lambda _m, _i, out: chosen.append(out[1]))
    try:
        out_SBH = head(
            rows.token_ids_BS.to(device),
            rows.position_ids_BS.to(device),
            hidden_BSH.transpose(0, 1).to(device),
            lambda ids_BS: reference.embed(ids_BS.cpu()).to(device),
        ).cpu()
    finally:
        if hook is not None:
            hook.remove()
    batch, length = rows.token_ids_BS.shape
    states = [part_SBH.transpose(0, 1) for part_SBH in out_SBH.split(length)]
    if not chosen:
        return [(state_BSH, None) for state_BSH in states]
    routed = [x.cpu().unflatten(0, (length, batch)).transpose(0, 1) for x in chosen]
    return list(zip(states, routed, strict=True))


def router_flips(
    chosen_BSE: Tensor | None, routing: Routing | None, like_BSH: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the chosen experts differ from the reference's, and how close its choice was."""
    if chosen_BSE is None or routing is None:
        none_BS = torch.zeros(like_BSH.shape[:2], dtype=torch.bool)
        return none_BS, torch.full(like_BSH.shape[:2], float("inf"))
    return (routing.chosen_BSE != chosen_BSE).any(-1), routing.gap_BS


def _device(head: NativeHead) -> torch.device:
    return next(head.parameters()).device


def _rows(x_BS: Tensor) -> Tensor:
    """The positions with a target, sequences one after the other."""
    return x_BS[:, :-2].flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Of a head's hidden states through the target's output layer, one value per row."""

    megatron_N: Tensor
    exact_N: Tensor
    argmax_N: Tensor

    @classmethod
    def of(
        cls, hidden_BSH: Tensor, rows: Rows, reference: ReferenceHead, device: torch.device
    ) -> _Scores:
        parts = []
        for hidden_SH, ids_S in zip(hidden_BSH, rows.token_ids_BS, strict=True):
            # Position t predicts token t + 2. One sequence at a time bounds the logits' memory.
            logits_NV = hidden_SH[:-2].float() @ reference.output_VH.t()
            targets_N = ids_S[2:]
            exact_N = torch.nn.functional.cross_entropy(
                logits_NV.double(), targets_N, reduction="none"
            )
            best_N = logits_NV.argmax(-1)
            # Last, because it overwrites the logits; on the device of Megatron's groups.
            megatron_N1 = vocab_parallel_cross_entropy(
                logits_NV[:, None].to(device), targets_N[:, None].to(device)
            )
            parts.append((megatron_N1[:, 0].cpu(), exact_N, best_N))
        return cls(*(torch.cat(part) for part in zip(*parts, strict=True)))
