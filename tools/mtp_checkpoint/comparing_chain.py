"""The later draft steps of two heads on the same rows; `comparing` compares the first.

B: batch, S: sequence, H: hidden size, N: rows whose target exists at every depth, V: vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tools.mtp_checkpoint.comparing import router_flips, run_native
from tools.mtp_checkpoint.native.layer import NativeHead
from tools.mtp_checkpoint.reference import ReferenceHead
from tools.mtp_checkpoint.reference_chain import served_chain, trained_chain
from tools.mtp_checkpoint.verify_options import LIMITS, Limits
from tools.mtp_checkpoint.verify_rows import Rows


@dataclasses.dataclass(frozen=True)
class StepComparison:
    """One depth after the first.

    Attributes:
        depth: From 2.
        delta: Largest difference of a hidden state over the rows that no router's choice has
            touched, at this depth or, through the attention, at an earlier one; inf without any.
        touched: Rows that were.
        flips_beyond_ties: Rows whose routers chose other experts at this depth, although no
            earlier choice had touched them and the reference's was no tie.
        argmax_agreement: Share of the same rows on which both heads prefer the same token.
        native_ce: Mean cross-entropy of the native head over them, float64.
        reference_ce: Of the reference.
        served_argmax: Share of all rows on which the reference prefers the same token if it
            attends as the engine does.
    """

    depth: int
    delta: float
    touched: int
    flips_beyond_ties: int
    argmax_agreement: float
    native_ce: float
    reference_ce: float
    served_argmax: float

    def bounded(self, limits: Limits) -> list[tuple[str, float, float]]:
        """Figures that must be small: name, value, limit."""
        ce_difference = abs(self.native_ce - self.reference_ce) / abs(self.reference_ce)
        named = [
            ("hidden state, max |Δ|, routers agreeing", self.delta, limits.hidden),
            (f"router flips with a top-k gap above {limits.tie_gap:g}", self.flips_beyond_ties, 0),
            ("share of rows with another best token", 1 - self.argmax_agreement, 1 - limits.argmax),
            ("mean CE, relative difference", ce_difference, limits.ce),
        ]
        return [(f"depth {self.depth}: {name}", *figures) for name, *figures in named]

    def informative(self) -> list[tuple[str, float]]:
        """Figures without a limit: name, value."""
        return [
            (f"depth {self.depth}: rows that a router flip has touched", self.touched),
            (
                f"depth {self.depth}: same best token with the engine's own attention",
                self.served_argmax,
            ),
        ]


@torch.no_grad()
def compare_later_steps(
    head: NativeHead, reference: ReferenceHead, rows: Rows, limits: Limits = LIMITS["local"]
) -> tuple[StepComparison, ...]:
    """Compare depths 2 and on; needs an expert-parallel size of 1.

    The reference feeds back what the head's engine does, by a table of its own, whatever the
    head was built with.
    """
    depths, engine = head.served.depths, head.served.engine
    if depths == 1:
        return ()
    given = (rows.token_ids_BS, rows.position_ids_BS, rows.hidden_BSH, depths, engine)
    native = run_native(head, reference, rows, rows.hidden_BSH)
    wanted = trained_chain(reference, *given)
    as_served = served_chain(reference, *given)
    touched_BS = torch.zeros_like(rows.token_ids_BS, dtype=torch.bool)
    found = []
    for step, ((got_BSH, chosen_BSE), (want_BSH, routing)) in enumerate(zip(native, wanted)):
        flips_BS, gap_BS = router_flips(chosen_BSE, routing, want_BSH)
        fresh_BS = flips_BS & ~touched_BS & (gap_BS > limits.tie_gap)
        row_BS = touched_BS | flips_BS
        if step > 0:
            fresh = int(_rows(fresh_BS, depths).sum())
            ids_BS = rows.token_ids_BS[:, step + 2 :]  # position t predicts token t + step + 2
            scores = [_scores(x, ids_BS, depths, reference) for x in (got_BSH, want_BSH)]
            served_N, _ = _scores(as_served[step], ids_BS, depths, reference)
            found.append(
                _judged(step + 1, got_BSH, want_BSH, row_BS, fresh, scores, served_N, depths)
            )
        # A later depth sees, through its attention, every row up to its own.
        touched_BS = row_BS.cumsum(dim=1) > 0
    return tuple(found)


def _judged(
    depth: int,
    got_BSH: Tensor,
    want_BSH: Tensor,
    touched_BS: Tensor,
    fresh: int,
    scores: list[tuple[Tensor, Tensor]],
    served_N: Tensor,
    depths: int,
) -> StepComparison:
    delta_N = _rows((got_BSH - want_BSH).abs().amax(-1), depths)
    clean_N = ~_rows(touched_BS, depths)
    (best_N, ce_N), (wanted_best_N, wanted_ce_N) = scores
    kept_N = delta_N[clean_N]
    usable = kept_N.numel() > 0 and bool(kept_N.isfinite().all())
    return StepComparison(
        depth=depth,
        delta=kept_N.max().item() if usable else float("inf"),
        touched=int((~clean_N).sum()),
        flips_beyond_ties=fresh,
        argmax_agreement=(best_N == wanted_best_N)[clean_N].double().mean().item(),
        native_ce=ce_N[clean_N].mean().item(),
        reference_ce=wanted_ce_N[clean_N].mean().item(),
        served_argmax=(served_N == wanted_best_N).double().mean().item(),
    )


def _scores(
    hidden_BSH: Tensor, targets_BS: Tensor, depths: int, reference: ReferenceHead
) -> tuple[Tensor, Tensor]:
    """Best tokens and cross-entropies, float64, of every row, a sequence at a time."""
    best, losses = [], []
    for hidden_SH, targets_S in zip(hidden_BSH, targets_BS, strict=True):
        kept_SH = hidden_SH[: -depths - 1]
        logits_NV = kept_SH.float() @ reference.output_VH.t()
        best.append(logits_NV.argmax(-1))
        losses.append(
            torch.nn.functional.cross_entropy(
                logits_NV.double(), targets_S[: len(kept_SH)], reduction="none"
            )
        )
    return torch.cat(best), torch.cat(losses)


def _rows(x_BS: Tensor, depths: int) -> Tensor:
    """The positions with a target at every depth, sequences one after the other."""
    return x_BS[:, : -depths - 1].flatten(0, 1)
