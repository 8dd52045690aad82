"""Which device, backend and seeds a test uses.

With a GPU, tests run on it over NCCL and nothing is replaced. Without one they run on the CPU over
gloo, with the stand-in. A case that needs more ranks than there are GPUs runs all of its ranks on
the CPU over gloo, in processes from which the GPUs are hidden: NCCL cannot put two ranks on one
GPU, and skipping the case would lose it. With MTP_TEST_SHARE_GPU=1 such ranks share the GPUs over
gloo instead, which moves tensors of a GPU in collectives but not from rank to rank.
"""

from __future__ import annotations

import importlib.util
import os
import random

import torch

from tests.support import standin

HIDE_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
SHARE_GPU = {"MTP_TEST_SHARE_GPU": "1"}


def has_gpu() -> bool:
    """Whether this process can use a CUDA device."""
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed and there is a GPU to run it on."""
    return has_gpu() and importlib.util.find_spec("transformer_engine") is not None


def device() -> torch.device:
    """The device of this rank's tensors: its own GPU, or the CPU."""
    if has_gpu():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend that goes with `device`: ``"nccl"`` or ``"gloo"``."""
    return "nccl" if has_gpu() and not _shares_gpu() else "gloo"


def environment_for(world_size: int) -> dict[str, str]:
    """Environment for the processes of a case with ``world_size`` ranks; hides too few GPUs."""
    if has_gpu() and (_shares_gpu() or torch.cuda.device_count() >= world_size):
        return {}
    return dict(HIDE_GPUS)


def _shares_gpu() -> bool:
    return SHARE_GPU.items() <= os.environ.items()


def prepare() -> None:
    """Make this process able to build and run Megatron modules. Repeated calls do nothing.

    Without a GPU it installs the stand-in and limits torch to one thread: tensors here are tiny,
    and ranks forked from a process that has used several OpenMP threads can hang. With a GPU it
    selects the device of ``LOCAL_RANK``.
    """
    standin.prepare_without_te()
    if not has_gpu():
        standin.install()
        torch.set_num_threads(1)
        return
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def seed_everything(seed: int = 1234) -> None:
    """Seed python, numpy and torch (all devices) with ``seed``, an int below 2**32."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
