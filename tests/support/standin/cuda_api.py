"""CPU replacements for the torch.cuda functions and tensor methods that Megatron-Core calls."""

from __future__ import annotations

import contextlib

import torch

from tests.support.standin._replace import replace

_CPU = torch.device("cpu")
# Upstream passes device="cuda" or pin_memory=True to these, and to no other factory function.
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")


class _InOrderStream:
    """Stands for streams and events: CPU work is already in order, so every method does nothing."""

    def __init__(self, *_args, **_kwargs):
        pass

    def record_event(self, event=None):
        """Return the event, as ``torch.cuda.Stream.record_event`` does."""
        return event if event is not None else _InOrderStream()

    def query(self) -> bool:
        """All work is complete."""
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        return None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


def install() -> None:
    """Replace devices, random states, streams, tensor methods and tensor factories."""
    _install_device()
    _install_random_state()
    _install_streams()
    _install_tensor_methods()
    _install_factories()


def _install_device() -> None:
    replace(torch.cuda, "current_device", lambda _original: _CPU)
    replace(torch.cuda, "set_device", lambda _original, device: None)
    replace(torch.cuda, "synchronize", lambda _original, device=None: None)


def _install_random_state() -> None:
    """Use torch's CPU generator.

    Without a GPU the original setters only queue a call for a later initialisation that never
    comes: the states would silently never change.
    """
    replace(torch.cuda, "get_rng_state", lambda _original, device=None: torch.get_rng_state())
    replace(
        torch.cuda,
        "set_rng_state",
        lambda _original, state, device=None: torch.set_rng_state(state),
    )
    replace(torch.cuda, "manual_seed", lambda _original, seed: _seed_cpu(seed))


def _seed_cpu(seed: int) -> None:
    """Seed the CPU generator alone: torch.manual_seed would call torch.cuda.manual_seed_all too."""
    torch.default_generator.manual_seed(int(seed))


def _install_streams() -> None:
    stream = _InOrderStream()
    replace(torch.cuda, "current_stream", lambda _original, device=None: stream)
    replace(torch.cuda, "stream", lambda _original, stream=None: contextlib.nullcontext())
    torch.cuda.Stream = _InOrderStream
    torch.cuda.Event = _InOrderStream


def _install_tensor_methods() -> None:
    replace(torch.Tensor, "cuda", lambda _original, self, *args, **kwargs: self)
    replace(torch.nn.Module, "cuda", lambda _original, self, *args, **kwargs: self)
    replace(torch.Tensor, "record_stream", lambda _original, self, stream: None)
    replace(torch.Tensor, "type", _cuda_type_name)


def _cuda_type_name(original, self, dtype=None, *args, **kwargs):
    """``Tensor.type()`` with CUDA names: optimizers compare it to ``'torch.cuda.FloatTensor'``."""
    if dtype is not None:
        return original(self, dtype, *args, **kwargs)
    name = original(self, *args, **kwargs)
    return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)


def _install_factories() -> None:
    # `with torch.device(...)` recognises factories by identity, from a set built on first use.
    # Build it while it still finds the originals, or `with torch.device("meta")` (the way
    # transformers loads checkpoints) would no longer apply to the replaced ones.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for name in _FACTORIES:
        replace(torch, name, _on_cpu)


def _on_cpu(original, *args, **kwargs):
    """Call a tensor factory with a CUDA device turned into the CPU and no pinned memory."""
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    return original(*args, **kwargs)


def _is_cuda(device) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")
