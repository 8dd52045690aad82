"""What is measured, per machine: the full sizes of each and small ones for tests."""

from __future__ import annotations

import dataclasses

import torch

K = 1024


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One set of sizes.

    Attributes:
        dtype: of hidden states and weights.
        hidden: width h of the hidden states; None for `tools.bench.width.balanced` of the machine.
        widths: more of them, at ``at``, beside what the matrix products alone take.
        lengths: sequence lengths s; vocabularies: V; depths: D; all combinations are measured.
        fractions: supervised shares of the tokens.
        chunk: ``mtp_loss_chunk_size``.
        at: (s, V) for which goals are stated, and which the other sections use.
        repeats: runs of which a median is taken.
        sequences: packed sequences per microbatch for the messages, with message_depths.
        step_layers, step_hidden, step_length, step_vocabulary: the model of a whole training step.
    """

    dtype: torch.dtype = torch.float32
    hidden: int | None = None
    widths: tuple[int, ...] = (32, 64, 128, 256)
    lengths: tuple[int, ...] = (1 * K, 4 * K, 16 * K)
    vocabularies: tuple[int, ...] = (8 * K, 32 * K)
    fractions: tuple[float, ...] = (1.0, 0.25, 0.05)
    depths: tuple[int, ...] = (1, 2)
    chunk: int = 384
    at: tuple[int, int] = (4 * K, 32 * K)
    repeats: int = 5
    sequences: tuple[int, ...] = (1, 8, 64)
    message_depths: tuple[int, ...] = (1, 2, 4)
    step_layers: int = 4
    step_hidden: int = 128
    step_length: int = 1 * K
    step_vocabulary: int = 32 * K


CPU = Sizes()
CPU_QUICK = dataclasses.replace(
    CPU,
    hidden=16,
    widths=(16, 32),
    lengths=(64, 128),
    vocabularies=(64, 128),
    fractions=(1.0, 0.25),
    depths=(1, 2),
    chunk=16,
    at=(64, 128),
    sequences=(1, 3),
    message_depths=(1, 2),
    step_layers=1,
    step_hidden=16,
    step_length=64,
    step_vocabulary=128,
)
GPU = dataclasses.replace(
    CPU,
    dtype=torch.bfloat16,
    hidden=4096,
    widths=(1 * K, 2 * K, 4 * K, 7 * K),
    lengths=(8 * K, 32 * K),
    vocabularies=(152 * K, 248 * K),
    depths=(1,),
    chunk=2 * K,
    at=(8 * K, 152 * K),
    step_hidden=1 * K,
    step_length=4 * K,
    step_vocabulary=152 * K,
)
GPU_QUICK = dataclasses.replace(CPU_QUICK, dtype=torch.bfloat16)
