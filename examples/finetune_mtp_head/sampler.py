"""Which samples a step sees, on which rank; and the proof that an epoch saw each one once."""

import torch
from torch import Tensor

from examples.finetune_mtp_head.errors import FinetuneError


class Sampler:
    """The order of the samples, a pure function of seed and step: its position is a step number.

    Each epoch is a new permutation cut into steps of ``batch_size``; the last step of an epoch
    holds what is left. The samples of a step go round the data ranks::

        10 samples, 4 per step, 2 data ranks, 1 per microbatch (order 0 … 9 shown)
        step 1   rank 0: [0] [2]   rank 1: [1] [3]
        step 3   rank 0: [8]       rank 1: [9]

    Every rank gets equally many microbatches, because experts exchange tokens in each: where its
    samples do not suffice, it gets empty ones.

    Args:
        samples: how many there are.
        batch_size: samples per step.
        micro_batch_size: samples per microbatch.
        data_rank, data_ranks: this rank's place among those with different samples.
        seed: of the permutations.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        micro_batch_size: int,
        data_rank: int,
        data_ranks: int,
        seed: int,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.steps_per_epoch = -(-samples // batch_size)
        self._micro_batch_size = micro_batch_size
        self._data_rank, self._data_ranks = data_rank, data_ranks
        self._seed = seed
        self._epoch, self._order = -1, torch.empty(0)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, that a step (from 1) belongs to."""
        return (step - 1) // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        """Whether a step (from 1) is the last of its epoch."""
        return step % self.steps_per_epoch == 0

    def batch(self, step: int) -> list[int]:
        """All samples of a step (from 1), over all ranks."""
        epoch = self.epoch_of(step)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(self.samples, generator=generator)
            self._epoch = epoch
        first = (step - 1 - epoch * self.steps_per_epoch) * self.batch_size
        return self._order[first : first + self.batch_size].tolist()

    def microbatches(self, step: int) -> list[list[int]]:
        """This rank's samples of a step (from 1); equally many lists on every rank."""
        return self.spread(self.batch(step))

    def spread(self, samples: list[int]) -> list[list[int]]:
        """This rank's part of any list of samples, as microbatches."""
        size = self._micro_batch_size
        most = -(-len(samples) // self._data_ranks)
        mine = samples[self._data_rank :: self._data_ranks]
        return [mine[first : first + size] for first in range(0, most, size)]


class SeenSamples:
    """How often each sample went through a forward pass in this epoch, on this rank.

    Args:
        samples: how many there are.
        copies: ranks that see one sample together: the expert-parallel size where the ranks of an
            expert group share a batch, else 1.
        group: all ranks.
    """

    def __init__(
        self, samples: int, copies: int, group: torch.distributed.ProcessGroup
    ) -> None:
        self._counts = torch.zeros(samples, dtype=torch.int64)
        self.copies = copies
        self._group = group

    def add(self, samples: list[int]) -> None:
        """Count a microbatch."""
        for sample in samples:
            self._counts[sample] += 1

    def total(self) -> Tensor:
        """Counts over all ranks, int64 [samples]. Every rank must call it."""
        total = self._counts.clone()
        if torch.distributed.get_backend(self._group) == "nccl":
            total = total.cuda()
        torch.distributed.all_reduce(total, group=self._group)
        return total.cpu()

    def restore(self, total: Tensor) -> None:
        """Continue from ``total`` of an earlier run; one rank keeps it for all."""
        self._counts.zero_()
        if self._group.rank() == 0:
            self._counts.copy_(total)

    def finish_epoch(self) -> None:
        """Check that every sample was seen exactly once, and start at zero. Every rank calls it.

        Raises:
            FinetuneError: says how many were not seen, and how many too often.
        """
        total = self.total()
        missed, doubled = (total < self.copies), (total > self.copies)
        if missed.any() or doubled.any():
            raise FinetuneError(
                f"an epoch must see each of its {len(total)} samples exactly once: "
                f"{int(missed.sum())} were missed (first {_first(missed)}), "
                f"{int(doubled.sum())} came too often (first {_first(doubled)})"
            )
        self._counts.zero_()


def _first(which: Tensor) -> str:
    found = which.nonzero()
    return str(int(found[0])) if len(found) else "none"
