"""Run real Megatron-Core modules on a machine without a GPU.

Megatron-Core calls a handful of ``torch.cuda`` functions unconditionally. `install` replaces those
functions, and the few Megatron functions built on them, by ones that act on CPU tensors. It is
always called explicitly, by tests, examples and benchmarks and never by the product, and it
refuses to replace anything when a GPU is there.

Parts, each one module:

* ``cuda_api``: what `install` replaces in torch.
* ``megatron_cuda``: what `install` replaces in Megatron because it assumes a GPU.
* ``without_te``: names that upstream defines only beside Transformer Engine. Needed with or
  without a GPU, so `prepare_without_te` is a call of its own that does nothing beside it.
* ``training``: what ``megatron.training`` needs on top; see `install_training`.
* ``precision``: float64 through the vocabulary-parallel cross entropy, for parity tests.
"""

from __future__ import annotations

import os

import torch

from tests.support.standin.precision import fp64_cross_entropy

__all__ = ["fp64_cross_entropy", "install", "install_training", "installed", "prepare_without_te"]

_installed: set[str] = set()


def installed() -> bool:
    """Whether `install` has replaced the device calls in this process."""
    return "core" in _installed


def install() -> None:
    """Replace the device calls of torch and megatron.core by CPU ones. Repeated calls do nothing.

    Works before and after megatron has been imported. ``torch.compile`` becomes a no-op, because
    compiling Megatron's fused functions costs a CPU test tens of seconds.

    Raises:
        RuntimeError: A CUDA device is available; nothing has been replaced.
    """
    _refuse_beside_a_gpu()
    if "core" in _installed:
        return
    _installed.add("core")
    _disable_compilation()
    from tests.support.standin import cuda_api

    cuda_api.install()
    # Imported only now: importing Megatron may already call torch.cuda.
    from tests.support.standin import megatron_cuda

    megatron_cuda.install()


def install_training() -> None:
    """Additionally make ``megatron.training`` run without a GPU. Repeated calls do nothing.

    Raises:
        RuntimeError: A CUDA device is available; nothing has been replaced.
    """
    install()
    if "training" in _installed:
        return
    _installed.add("training")
    from tests.support.standin import training

    training.install()


def prepare_without_te() -> None:
    """Define what upstream only defines beside Transformer Engine; does nothing when it is there.

    Replaces no device call, so it is also right on a GPU machine without Transformer Engine.
    """
    if "without_te" in _installed:
        return
    _installed.add("without_te")
    from tests.support.standin import without_te

    without_te.install()


def _refuse_beside_a_gpu() -> None:
    """Raise RuntimeError when this process can use a CUDA device."""
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU stand-in refuses to install: expected a process without a CUDA device, but "
            f"torch.cuda.is_available() is True ({torch.cuda.device_count()} device(s)). Run on "
            "the GPU without it, or hide the GPU with CUDA_VISIBLE_DEVICES= to test on the CPU."
        )


def _disable_compilation() -> None:
    """Make torch.compile a no-op, for functions already decorated and for those to come."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read when a function is decorated, and by children
    import torch._dynamo

    torch._dynamo.config.disable = True  # read when an already decorated function is called
