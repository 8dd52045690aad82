"""Tensor operations that make the host wait for the device, noticed also where there is none."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal")
_READING = (
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.new_tensor,  # copies from the host's pageable memory, and waits for it
)


class HostSyncs(TorchDispatchMode):
    """Collects in ``names`` the operations run inside it whose result or shape the host must know."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self._reads = _Reads(self.names)

    def __enter__(self):
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        return self._reads.__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        if name in _WAITING or by_mask:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Reads of a tensor in Python and copies to it, which on the CPU are no tensor operation."""

    def __init__(self, names: list[str]):
        super().__init__()
        self._names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READING:
            self._names.append(func.__name__)
        return func(*args, **(kwargs or {}))
