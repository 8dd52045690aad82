"""Numbers that the device counts and the host needs, without making either wait."""

from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import Tensor


class HostCounts:
    """How many rows of each depth count on this rank, for a loop over chunks of them.

    The loop has to know on the host how often to run; asking the device would let it run empty. So
    the numbers start their way to the host when the plan of the microbatch is made, before the decoder,
    and are waited for where the objective starts. By then the decoder's work is queued behind them:
    the host waits for something that is done long before the device runs out of work.

    While a CUDA graph is captured the numbers do not exist yet: `read` returns None for each, and
    the objective takes all rows.
    """

    def __init__(self, masks_DBS: Sequence[Tensor]):
        """Count the non-zero elements of each mask and start the copy."""
        counts_D = torch.stack([(mask != 0).sum() for mask in masks_DBS])
        self._event: Optional[torch.cuda.Event] = None
        self._host_D: Optional[Tensor] = None
        self._depths = len(masks_DBS)
        if counts_D.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._host_D = torch.empty(counts_D.shape, dtype=counts_D.dtype, pin_memory=counts_D.is_cuda)
        self._host_D.copy_(counts_D, non_blocking=True)
        if counts_D.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Optional[int]]:
        """Per depth, the rows that count; waits for the copy, not for the device."""
        if self._host_D is None:
            return [None] * self._depths
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return [int(count) for count in self._host_D.numpy()]
