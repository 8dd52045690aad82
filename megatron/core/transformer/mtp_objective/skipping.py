"""Hidden states of a pipeline whose heads do not run in one call.

Shape suffixes: S positions, B batch rows, H hidden size, D depths. After the MTP block the decoder's
and the heads' hidden states follow each other along S: [(1 + d) s, b, h].
"""

import torch
from torch import Tensor


def skip_heads(hidden_SBH: Tensor, num_depths: int) -> Tensor:
    """What a stage that only holds heads sends on instead of running them.

    Args:
        hidden_SBH: [s, b, h] of the decoder.
        num_depths: D.

    Returns:
        [(1 + d) s, b, h], the shape the next stage splits; all but the first part unused.
    """
    return torch.cat([hidden_SBH] + [hidden_SBH.detach()] * num_depths, dim=0)


def drop_heads(hidden_SBH: Tensor, num_depths: int) -> Tensor:
    """The decoder's part, [s, b, h], of [(1 + d) s, b, h]."""
    return torch.chunk(hidden_SBH, 1 + num_depths, dim=0)[0]
