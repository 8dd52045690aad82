"""The sums behind the metrics of `metrics`, of one model on one rank.

Shape suffixes: B batch rows, S local positions, D depths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional, Sequence

import torch
from torch import Tensor

from megatron.core.transformer.mtp_objective.targets import DepthTargets

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

_ATTRIBUTE = "_mtp_metric_sums"
PER_DEPTH = 4  # weighted loss, weight, right predictions, supervised targets
EXPECTED_PER_DEPTH = 2  # expected acceptances, supervised targets they were computed for


class MetricSums:
    """Sums of one model on one rank. Recording never waits for the device."""

    def __init__(self, num_depths: int):
        self.num_depths = num_depths
        self.sums: Optional[Tensor] = None  # float64 [4 D + 2]; the last two: Σ lengths, positions
        self.expected: Optional[Tensor] = None  # float64 [2 D + 2] likewise
        # Of the forward under way, and which positions count so far.
        self._greedy = self._sampled = self._positions_BS = None

    @classmethod
    def of(cls, model: LanguageModule) -> MetricSums:
        """The sums of a model, kept as a plain attribute: not in its state dict."""
        if _ATTRIBUTE not in vars(model):
            setattr(model, _ATTRIBUTE, cls(model.config.mtp_num_layers))
        return getattr(model, _ATTRIBUTE)

    @torch.no_grad()
    def add(
        self,
        depth: int,
        targets: DepthTargets,
        masked_loss_BS: Tensor,
        right_BS: Tensor,
        expected_BS: Optional[Tensor] = None,
    ):
        """Add one depth of one forward; depths come in order.

        Args:
            depth: k - 1.
            targets: masks of this microbatch, [b, s].
            masked_loss_BS: m_k CE_k, [b, s].
            right_BS: bool [b, s], whether the most likely token is the label. Where m_k is 0 it
                does not matter.
            expected_BS: probability of acceptance [b, s], the same; None without a teacher.
        """
        mask_BS = targets.masks_DBS[depth]
        supervised_BS = mask_BS != 0
        right_BS = right_BS & supervised_BS
        if depth == 0:
            self._positions_BS = targets.mask_BS != 0
            self._greedy, self._sampled = _Chain.of(mask_BS), _Chain.of(mask_BS)
        self._positions_BS = self._positions_BS & supervised_BS
        self._greedy = self._greedy.longer(right_BS)
        values = [masked_loss_BS, mask_BS, right_BS, supervised_BS]
        self.sums = self._added(self.sums, PER_DEPTH, depth, values)
        if expected_BS is not None:
            expected_BS = expected_BS * supervised_BS
            self._sampled = self._sampled.longer(expected_BS)
            values = [expected_BS, supervised_BS]
            self.expected = self._added(self.expected, EXPECTED_PER_DEPTH, depth, values)
        if depth < self.num_depths - 1:
            return
        positions_BS, last = self._positions_BS, self.num_depths
        values = [self._greedy.length_BS * positions_BS, positions_BS]
        self.sums = self._added(self.sums, PER_DEPTH, last, values)
        if expected_BS is not None:
            values = [self._sampled.length_BS * positions_BS, positions_BS]
            self.expected = self._added(self.expected, EXPECTED_PER_DEPTH, last, values)
        self._greedy = self._sampled = self._positions_BS = None

    def _added(
        self, sums: Optional[Tensor], width: int, depth: int, values: Sequence[Tensor]
    ) -> Tensor:
        """``sums`` with the values of a depth added; the place behind all depths is number D."""
        added = torch.stack([value.sum(dtype=torch.float64) for value in values])
        if sums is None:
            sums = added.new_zeros(width * self.num_depths + 2)
        sums[width * depth : width * depth + len(values)] += added
        return sums


@dataclass(frozen=True)
class _Chain:
    """Of one forward: a_1 · … · a_k, and 1 + the sum of those so far, both [b, s]."""

    product_BS: Tensor
    length_BS: Tensor

    @classmethod
    def of(cls, like_BS: Tensor) -> _Chain:
        ones_BS = torch.ones_like(like_BS, dtype=torch.float64)
        return cls(ones_BS, ones_BS)

    def longer(self, accepted_BS: Tensor) -> _Chain:
        product_BS = self.product_BS * accepted_BS
        return _Chain(product_BS, self.length_BS + product_BS)
