"""What upstream only defines, or only allows, when Transformer Engine is installed."""

from __future__ import annotations

import contextlib
import importlib.util

import torch

from tests.support.release import hybrid_block
from tests.support.standin._replace import replace


def install() -> None:
    """Fill the gaps, unless Transformer Engine is there."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    _install_recompute_names()
    _install_torch_norms()
    _install_inference_check()
    _install_torch_adam()


def _install_recompute_names() -> None:
    """Selective recompute names two functions that exist only with Transformer Engine."""
    from megatron.core.tensor_parallel import random

    if hasattr(random, "FP8GlobalStateManager"):
        return

    class FP8GlobalStateManager:
        """FP8 is off."""

        is_fp8_enabled = staticmethod(lambda: False)

    def no_context(*_args, **_kwargs):
        return contextlib.nullcontext()

    random.FP8GlobalStateManager = FP8GlobalStateManager
    random.activation_recompute_forward = no_context
    random.fp8_autocast = no_context


def _install_torch_norms() -> None:
    """Torch norms under sequence parallelism, and as HybridStack's final norm.

    Upstream's wrapper asserts that sequence parallelism is off. The gradient of a norm weight is
    then only a partial sum, which finalize_model_grads completes for parameters tagged so.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__
    norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}

    def new(cls, config, hidden_size, eps=1e-5, **kwargs):
        if not config.sequence_parallel:
            return original(cls, config, hidden_size, eps, **kwargs)
        norm = norms[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = staticmethod(new)
    hybrid_block().TENorm = WrappedTorchNorm


def _install_inference_check() -> None:
    """Releases after 0.19 test modules against Transformer Engine classes, here mocks."""
    from megatron.core.transformer import multi_token_prediction

    name = "is_inference_column_parallel_linear"
    if hasattr(multi_token_prediction, name):
        replace(multi_token_prediction, name, lambda _original, module: False)


def _install_torch_adam() -> None:
    """Save and load the distributed optimizer's state with torch's Adam.

    Torch keeps ``step`` as a tensor in each parameter's state, and has no state before the first
    step; upstream expects neither.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    @torch.no_grad()  # fp32 shards are views of leaf parameters
    def set_states(original, self, model_param, tensors):
        return original(self, model_param, {"step": None, **tensors})

    def state_dict(original, self):
        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return original(self)

    replace(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states)
    replace(DistributedOptimizer, "state_dict", state_dict)
