"""The part of Transformer Engine that Megatron's MTP layer is made of, in plain torch, on the CPU.

Not Transformer Engine: the same module names, constructor arguments, parameter names and shapes,
with arithmetic in float32 behind them. Megatron's own wrappers, its layer specs and its distributed
checkpoints run unchanged on top. What is shown with it is the wiring: which modules are
built, which tensor lies in which parameter, and what order the layer works in. What is not: the
kernels.
"""

from __future__ import annotations

import contextlib
import sys
import types

import torch
from torch import Tensor

VERSION = "2.6.0"


class _Module(torch.nn.Module):
    """A module with an extra state, as Transformer Engine's all have; it is empty without FP8."""

    fp8 = fp8_calibration = False

    def __init__(self):
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms=1):
        """FP8 is off."""

    def get_extra_state(self) -> Tensor:
        """Nothing."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        """Nothing."""
        assert state is None or state.numel() == 0


def _parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))


def _rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
    scale = 1.0 + weight if zero_centered_gamma else weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


class Linear(_Module):
    """x Wᵀ + b."""

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        return_bias=False,
        parallel_mode=None,
        params_dtype=torch.float32,
        **_unused,
    ):
        super().__init__()
        self.parallel_mode, self.use_bias, self.return_bias = parallel_mode, bias, return_bias
        self.in_features, self.out_features = in_features, out_features
        self.weight = _parameter(out_features, in_features, dtype=params_dtype)
        if bias:
            self.bias = _parameter(out_features, dtype=params_dtype)

    def forward(self, x, is_first_microbatch=None):
        """The product, and the bias apart if it is to be returned."""
        bias = self.bias if self.use_bias else None
        if self.return_bias:
            return torch.nn.functional.linear(x, self.weight), bias
        return torch.nn.functional.linear(x, self.weight, bias)


class LayerNormLinear(Linear):
    """RMSNorm and the product behind it, in one module."""

    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        normalization="LayerNorm",
        zero_centered_gamma=False,
        params_dtype=torch.float32,
        **others,
    ):
        super().__init__(in_features, out_features, params_dtype=params_dtype, **others)
        assert normalization == "RMSNorm"
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.layer_norm_weight = _parameter(in_features, dtype=params_dtype)

    def forward(self, x, is_first_microbatch=None):
        """See `Linear`, of the normalised input."""
        x = _rms_norm(x, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        return super().forward(x)


class RMSNorm(_Module):
    """RMSNorm, by w or by 1 + w."""

    def __init__(
        self,
        normalized_shape,
        eps=1e-5,
        sequence_parallel=False,
        zero_centered_gamma=False,
        params_dtype=torch.float32,
        **_unused,
    ):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = _parameter(normalized_shape, dtype=params_dtype)

    def forward(self, x):
        """The normalised input."""
        return _rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)


class GroupedLinear(_Module):
    """One product per expert, on its rows: parameters ``weight0``, ``weight1``, …"""

    def __init__(
        self, num_gemms, in_features, out_features, bias=True, params_dtype=torch.float32, **_unused
    ):
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias, self.tp_size = num_gemms, bias, 1
        self.in_features, self.out_features = in_features, out_features
        for number in range(num_gemms):
            weight = _parameter(out_features, in_features, dtype=params_dtype)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x, m_splits, is_first_microbatch=None):
        """``m_splits[i]`` rows for expert i, one after the other."""
        parts = x.split([int(rows) for rows in m_splits])
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        done = [torch.nn.functional.linear(p, w) for p, w in zip(parts, weights, strict=True)]
        return torch.cat(done)


class DotProductAttention(_Module):
    """Causal attention, [s, b, n, d] to [s, b, n·d]."""

    def __init__(self, num_attention_heads, kv_channels, softmax_scale=None, **_unused):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, attn_mask_type="causal", **_unused):
        """Query heads share key-value heads in order."""
        assert attn_mask_type == "causal" and attention_mask is None
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class _Fp8State:
    """FP8 is off."""

    is_fp8_enabled = staticmethod(lambda: False)
    FP8_ENABLED = FP8_CALIBRATION = False


@contextlib.contextmanager
def _nothing(*_args, **_kwargs):
    yield


def install() -> None:
    """Make ``import transformer_engine`` find this. Before anything of Megatron is imported."""
    assert "megatron.core" not in sys.modules and "transformer_engine" not in sys.modules
    modules = {
        "transformer_engine": {"__version__": VERSION, "__path__": []},
        "transformer_engine.pytorch": {
            "__path__": [],
            "Linear": Linear,
            "LayerNormLinear": LayerNormLinear,
            "LayerNorm": RMSNorm,
            "RMSNorm": RMSNorm,
            "GroupedLinear": GroupedLinear,
            "DotProductAttention": DotProductAttention,
        },
        "transformer_engine.pytorch.fp8": {
            "FP8GlobalStateManager": _Fp8State,
            "fp8_autocast": _nothing,
            "fp8_model_init": _nothing,
        },
        "transformer_engine.pytorch.distributed": {
            "CudaRNGStatesTracker": object,
            "checkpoint": None,
            "activation_recompute_forward": _nothing,
        },
        "transformer_engine.pytorch.tensor": {
            "QuantizedTensor": type("QuantizedTensor", (torch.Tensor,), {}),
        },
        "transformer_engine.common": {"__path__": []},
        "transformer_engine.common.recipe": {
            "DelayedScaling": type("DelayedScaling", (), {}),
            "Format": type("Format", (), {}),
        },
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(name, None)
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
