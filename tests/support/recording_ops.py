"""How large the tensors are that a computation makes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestOutput(TorchDispatchMode):
    """The largest number of elements an operation inside it returned; and how many products."""

    def __init__(self):
        super().__init__()
        self.elements, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm")
        return out
