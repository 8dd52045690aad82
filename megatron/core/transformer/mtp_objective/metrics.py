"""How good the heads are: per depth and as the accepted length, per model, read with one call.

With CE_k(t) depth k's token cross-entropy, m_k its mask (m_0 the unshifted one), a_k(t) whether
depth k's most likely token is its label, and sums over all positions of all training forwards since
the last reset and over the data- and context-parallel ranks:

    loss of depth k         Σ m_k CE_k / Σ m_k
    acceptance of depth k   share of a_k among the positions with m_k ≠ 0
    accepted length         mean of 1 + Σ_k Π_{j≤k} a_j over the positions with m_0, …, m_D all ≠ 0

Where the policy was asked as a teacher, with e_k(t) the probability that rejection sampling
accepts depth k's draft, Σ min(p, q) of the policy's distribution p and the head's q,

    expected acceptance       mean of e_k over the positions with m_k ≠ 0
    expected accepted length  mean of 1 + Σ_k Π_{j≤k} e_j over the positions of the accepted length

The accepted length is what greedy speculative decoding with all D depths emits per step on the same
tokens: the policy's own token, and the drafts up to the first wrong one. A position counts if the
policy's own label and that of every depth are supervised. So neither prompts pull it down nor the
ends of sequences, where fewer than D drafts can be scored.

Shape suffixes: D depths.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Iterator, Optional, Sequence, Union

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.metric_sums import (
    EXPECTED_PER_DEPTH,
    PER_DEPTH,
    MetricSums,
)

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule


class MTPMetrics:
    """Metrics of one model over all ranks that were asked, as plain numbers.

    The first number that is read waits for the device, and no earlier.
    """

    def __init__(self, sums: Tensor, expected: Optional[Tensor] = None):
        """Take reduced sums in the order of `MetricSums`.

        Args:
            sums: float64 [4 D + 2].
            expected: float64 [2 D + 2]; None where no teacher was asked.
        """
        self.num_depths = (sums.numel() - 2) // PER_DEPTH  # D
        if expected is None:
            expected = sums.new_zeros(EXPECTED_PER_DEPTH * self.num_depths + 2)
        self._sums = torch.cat([sums, expected])
        self._expected_from = sums.numel()

    @functools.cached_property
    def _all_numbers(self) -> list[float]:
        return self._sums.tolist()

    @property
    def _numbers(self) -> list[float]:
        return self._all_numbers[: self._expected_from]

    @property
    def _expected(self) -> list[float]:
        return self._all_numbers[self._expected_from :]

    @property
    def losses(self) -> list[float]:
        """Per depth, the token-weighted mean of what is trained (with ``mtp_objective="ce"`` the
        cross-entropy), before depth weights; NaN where nothing was supervised."""
        return self._ratios(0, 1)

    @property
    def acceptance(self) -> list[float]:
        """Per depth, the share of right greedy predictions; NaN where nothing was supervised."""
        return self._ratios(2, 3)

    @property
    def supervised_tokens(self) -> list[int]:
        """Per depth, the targets that count."""
        return [int(self._at(depth, 3)) for depth in range(self.num_depths)]

    @property
    def accepted_length(self) -> float:
        """Mean tokens per step of greedy speculation, from 1 to 1 + D; NaN without a position."""
        return _ratio(self._numbers[-2], self._numbers[-1])

    @property
    def accepted_length_positions(self) -> int:
        """Positions that the accepted length is a mean over."""
        return int(self._numbers[-1])

    @property
    def expected_acceptance(self) -> list[float]:
        """Per depth, the mean probability that a sampled draft is accepted; NaN if not computed."""
        found, width = self._expected, EXPECTED_PER_DEPTH
        return [_ratio(*found[width * d : width * d + width]) for d in range(self.num_depths)]

    @property
    def expected_accepted_length(self) -> float:
        """Mean tokens per step of sampled speculation, from 1 to 1 + D; NaN if not computed.

        An estimate: accepted drafts are no draws from the policy, as the tokens of the text are.
        """
        return _ratio(*self._expected[-2:])

    def as_dict(self, prefix: str = "mtp") -> dict[str, float]:
        """All numbers for a logger: ``mtp_1_loss``, …, ``mtp_accepted_length``.

        The expected ones are among them where they were computed for some position.
        """
        names = ["losses", "acceptance", "supervised_tokens"]
        named = {f"{prefix}_accepted_length": self.accepted_length}
        if any(self._expected):
            named[f"{prefix}_expected_accepted_length"] = self.expected_accepted_length
            names.append("expected_acceptance")
        for name in names:
            short = {"losses": "loss"}.get(name, name)
            for depth, value in enumerate(getattr(self, name)):
                named[f"{prefix}_{depth + 1}_{short}"] = value
        return named

    def __repr__(self) -> str:
        return f"MTPMetrics({self.as_dict()})"

    def _at(self, depth: int, place: int) -> float:
        return self._numbers[PER_DEPTH * depth + place]

    def _ratios(self, above: int, below: int) -> list[float]:
        return [_ratio(self._at(d, above), self._at(d, below)) for d in range(self.num_depths)]


def mtp_metrics(
    model: Union[torch.nn.Module, Sequence[torch.nn.Module]],
    reset: bool = True,
    group: Optional[torch.distributed.ProcessGroup] = None,
) -> Optional[MTPMetrics]:
    """Reduce what a model's training forwards have recorded: one collective, no other state.

    Every rank of the group must call it, whether it has trained or not.

    Args:
        model: a GPTModel or HybridModel, in whatever wrappers, or the list of its pipeline chunks.
        reset: start the next sums at zero.
        group: ranks to sum over; None: the data- and context-parallel ranks of the model.

    Returns:
        The metrics, alike on every rank of the group; None on pipeline stages without the loss,
        which do not communicate.

    Raises:
        ValueError: there is no model with MTP in it, or more than one.
    """
    found = list(_language_modules(model))
    if not found:
        raise ValueError(
            "mtp_metrics needs a GPTModel or HybridModel with mtp_num_layers > 0, found none in "
            f"{type(model).__name__}: pass the model that forward was called on."
        )
    owners = models_with_loss(model)
    if len(owners) > 1:
        raise ValueError(
            f"mtp_metrics reads one model, found {len(owners)} with a loss: call it for each."
        )
    if not owners:
        return None
    recorded = MetricSums.of(owners[0])
    device, parts = next(owners[0].parameters()).device, []
    for sums, width in (
        (recorded.sums, PER_DEPTH), (recorded.expected, EXPECTED_PER_DEPTH)
    ):
        if sums is None:
            size = width * recorded.num_depths + 2
            sums = torch.zeros(size, dtype=torch.float64, device=device)
        parts.append(sums)
    reduced = torch.cat(parts)
    if reset:
        recorded.sums = recorded.expected = None
    torch.distributed.all_reduce(reduced, group=_ranks_of(owners[0]) if group is None else group)
    return MTPMetrics(*reduced.split([part.numel() for part in parts]))


def models_with_loss(model) -> list[LanguageModule]:
    """The GPTModels and HybridModels with MTP in ``model`` whose loss is on this pipeline stage."""
    return [module for module in _language_modules(model) if module.post_process]


def _ranks_of(model: LanguageModule) -> torch.distributed.ProcessGroup:
    """Data- and context-parallel ranks; as upstream's tracker where the model was given none."""
    group = getattr(model.pg_collection, "dp_cp", None)
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def _language_modules(model) -> Iterator[LanguageModule]:
    """Every chunk of a model with MTP, inside wrappers and containers."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    seen = set()
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        for module in chunk.modules():
            if isinstance(module, LanguageModule) and module.config.mtp_num_layers:
                if id(module) not in seen:
                    seen.add(id(module))
                    yield module


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan
