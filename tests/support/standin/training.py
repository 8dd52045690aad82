"""What ``megatron.training`` needs on top of the core stand-in."""

from __future__ import annotations

import functools
import types

import torch

from tests.support.standin._replace import replace


def install() -> None:
    """Let ``megatron.training.pretrain`` start and train on the CPU."""
    # A count of 0 makes upstream skip the model-parallel groups and the random seeds.
    replace(torch.cuda, "device_count", lambda _original: 8)
    properties = types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=1 << 34, multi_processor_count=1
    )
    replace(torch.cuda, "get_device_properties", lambda _original, device=None: properties)
    replace(torch.distributed, "init_process_group", _without_device_id)
    _install_initialisation()


def _without_device_id(original, *args, device_id=None, **kwargs):
    """Drop ``device_id='cuda:0'``, which gloo does not take."""
    return original(*args, **kwargs)


def _install_initialisation() -> None:
    from megatron.core.datasets import utils
    from megatron.training import training

    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )
    # Warms fused kernels up on the GPU.
    replace(training, "set_jit_fusion_options", lambda _original, *_args, **_kwargs: None)
    # The installed package has the compiled helpers, but no Makefile to compile them again.
    replace(utils, "compile_helpers", lambda _original: None)
