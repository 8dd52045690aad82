"""What a call sends to other ranks, and where it makes the host wait for the device.

Both are counted from the operators that reach torch's dispatcher, so that neither needs a GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

_RECEIVES = ("recv_", "recv_any_source_")
# What c10d's operators call the tensors that leave the rank; others only get filled.
_SENT = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors")
# The release's files and ours that belong to the heads and their objective.
_MTP_FILES = ("multi_token_prediction.py", "mtp_objective")
_ATTENTION = ("tests/support/attention.py",)  # the reference attention's own messages
# A layer inside a head waits where the decoder's layers do: packed rotary embeddings, attention.
_LAYERS = (*_ATTENTION, "transformer/transformer_layer.py", "hybrid/hybrid_block.py")


@dataclasses.dataclass
class Traffic:
    """What one rank sent.

    Attributes:
        calls: by operator, e.g. ``{"send": 256, "recv_": 256}``.
        bytes: of all tensors this rank handed over to be sent or reduced.
    """

    calls: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    bytes: int = 0

    @property
    def total(self) -> int:
        """Calls of any kind."""
        return sum(self.calls.values())

    @property
    def collectives(self) -> int:
        """Calls that are no point-to-point messages."""
        return sum(n for name, n in self.calls.items() if name not in (*_RECEIVES, "send"))


class CountTraffic(TorchDispatchMode):
    """Counts what leaves this rank inside the block, but not for the attention.

    Calls on a group of one rank send nothing and do not count: upstream's vocabulary-parallel
    cross-entropy makes three per depth without tensor parallelism.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and _leaves_rank(args) and not _called_from(_ATTENTION):
            name = func._schema.name.split("::")[1]
            self.traffic.calls[name] += 1
            if name not in _RECEIVES:
                self.traffic.bytes += _sent_bytes(func, args)
        return func(*args, **(kwargs or {}))


class FindSyncs:
    """Records every place of the MTP path at which the host waits for a value of the device.

    The path is the heads' own code and the objective; the transformer layer inside a head is the
    decoder's.

    Operators whose result depends on values (``item``, ``nonzero``, boolean indexing, …) are seen
    in the dispatcher; ``tolist``, ``cpu`` and the like as function calls, because on the CPU they
    run without an operator. A copy with ``non_blocking=True`` does not wait, and what was copied so
    may be read: its reader waits for an event, which is not the device.

    Attributes:
        places: by "file:line operator", how often.
    """

    def __init__(self) -> None:
        self.places: collections.Counter = collections.Counter()
        on_host = WeakIdKeyDictionary()
        self._modes = _SyncOperators(self.places, on_host), _SyncMethods(self.places, on_host)

    def __enter__(self) -> FindSyncs:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.places.values())


def cuda_waits(call: Callable[[], object]) -> int:
    """How often the host waits for the device during a call, as CUDA itself reports it.

    Needs a GPU. The judge of `FindSyncs`, whose list of operators is ours.
    """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in seen)


class _SyncOperators(TorchDispatchMode):
    """The operators that copy a value to the host or size a result by values."""

    WAIT = {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "equal",
    }

    def __init__(self, places: collections.Counter, on_host: WeakIdKeyDictionary) -> None:
        super().__init__()
        self._places, self._on_host = places, on_host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in self.WAIT or _indexes_by_mask(name, args) or _copies_to_host(name, args, kwargs):
            _note(self._places, name)
        if name == "copy_" and _without_waiting(args, kwargs):
            self._on_host[args[0]] = True
        return func(*args, **kwargs)


class _SyncMethods(TorchFunctionMode):
    """Methods that read values without an operator, at least on the CPU."""

    READ = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}

    def __init__(self, places: collections.Counter, on_host: WeakIdKeyDictionary) -> None:
        super().__init__()
        self._places, self._on_host = places, on_host

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.READ and args[0] not in self._on_host:
            _note(self._places, func.__name__)
        elif func is torch.Tensor.to and not kwargs.get("non_blocking"):
            # A device object may be the tensors' own, which on a GPU is not the host.
            targets = (*args[1:2], kwargs.get("device"))
            if any(isinstance(value, str) and value == "cpu" for value in targets):
                _note(self._places, "to")
        return func(*args, **kwargs)


def _note(places: collections.Counter, name: str) -> None:
    if (frame := _mtp_frame()) is not None:
        places[f"{frame} {name}"] += 1


def _indexes_by_mask(name: str, args: tuple) -> bool:
    """Indexing or index assignment by a boolean tensor, whose result has as many rows as it has True."""
    if name not in ("index", "index_put_", "index_put"):
        return False
    masks = (torch.bool, torch.uint8)
    return any(torch.is_tensor(index) and index.dtype in masks for index in args[1])


def _copies_to_host(name: str, args: tuple, kwargs: dict) -> bool:
    """A copy from a device to the host that waits; never true in a process without a device."""
    if name == "_to_copy":
        target = kwargs.get("device")
        to_host = target is not None and torch.device(target).type == "cpu"
        return to_host and args[0].device.type != "cpu" and not kwargs.get("non_blocking")
    if name == "copy_":
        to_host = args[0].device.type == "cpu" and args[1].device.type != "cpu"
        return to_host and not _without_waiting(args, kwargs)
    return False


def _without_waiting(args: tuple, kwargs: dict) -> bool:
    """Whether a ``copy_`` is a non-blocking one."""
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _leaves_rank(args: tuple) -> bool:
    """Whether the group among a c10d operator's arguments has more than one rank."""
    groups = [one for one in args if isinstance(one, torch.ScriptObject)]
    return torch.distributed.ProcessGroup.unbox(groups[0]).size() > 1


def _sent_bytes(func, args: tuple) -> int:
    """Bytes of the tensors that a call of ``func`` hands over; those it only fills do not count."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args))
    sent = next((given[name] for name in _SENT if name in given), None)
    tensors = [leaf for leaf in tree_leaves(sent) if torch.is_tensor(leaf)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _frames() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _called_from(files: tuple[str, ...]) -> bool:
    return any(name.endswith(files) for name, _ in _frames())


def _mtp_frame() -> str | None:
    """ "file:line" of the innermost MTP code on the stack; None outside it and inside its layers."""
    for name, line in _frames():
        if name.endswith(_LAYERS):
            return None
        if any(part in name for part in _MTP_FILES):
            return f"{Path(name).name}:{line}"
    return None
