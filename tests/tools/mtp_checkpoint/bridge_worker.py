"""Imports a head with NVIDIA's megatron-bridge and with this tool, and compares every parameter.

    python -m tests.tools.mtp_checkpoint.bridge_worker CHECKPOINT FOLDER_OF_THE_BRIDGE

The bridge's own mappings and loader run unchanged. It expects Transformer Engine's layer, whose
parameters have other names: a skeleton with those names and the head's shapes stands for it.
Packages that the bridge imports and this path never calls are stubs. A process of its own: the
stubs must not reach other tests.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import re
import sys
import types
from pathlib import Path

import torch

from tests.support import parallel_world, prepare

STUBBED = ("transformer_engine", "transformer_engine_torch", "ray", "modelscope")
STUBBED += ("nvidia_resiliency_ext",)
# Classes by which the bridge tells how a parameter is split; with one rank none is.
CLASSES = {
    "norm": "TENorm",
    "linear_qkv": "TELayerNormColumnParallelLinear",
    "linear_proj": "TERowParallelLinear",
    "eh_proj": "TEColumnParallelLinear",
    "router": "TopKRouter",
    "shared_experts": "SharedExpertMLP",
    "linear_fc1": "TEColumnParallelLinear",
    "linear_fc2": "TERowParallelLinear",
}


class Stub(types.ModuleType):
    """A module that has every class and submodule that is asked for."""

    __path__: list[str] = []
    __version__ = "2.9.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        made = type(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `STUBBED`."""

    def find_spec(self, name, path=None, target=None):
        """A stub for the names that are listed, nothing for others."""
        if name.partition(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        """The stub."""
        return Stub(spec.name)

    def exec_module(self, module):
        """Nothing to run."""


def import_bridge(folder: Path):
    """The bridge's class for Qwen3.5-MoE, and the module that reads its safetensors."""
    sys.path.append(str(folder))
    sys.meta_path.append(StubFinder())
    # Without these packages' own __init__, which import every model there is.
    for name in ("megatron.bridge", "megatron.bridge.models"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = module
    bridge = importlib.import_module("megatron.bridge.models.qwen.qwen35_bridge")
    state = importlib.import_module("megatron.bridge.models.hf_pretrained.state")
    return bridge.Qwen35MoEBridge, state


def te_name(name: str) -> str:
    """The name that a parameter of the local layer has in Transformer Engine's."""
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    return re.sub(r"local_experts\.(\d+)\.(linear_fc\d)\.weight", r"\2.weight\1", name)


def skeleton(tensors: dict[str, torch.Tensor], config) -> torch.nn.Module:
    """Modules with Transformer Engine's names, every parameter NaN."""
    root = torch.nn.Module()
    root.config = config
    for name, tensor in tensors.items():
        *path, last = f"mtp.layers.0.{te_name(name)}".split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                kind = "norm" if "norm" in part else part
                made = type(CLASSES.get(kind, "Container"), (torch.nn.Module,), {})()
                made.config = config
                module.add_module(part, made)
            module = getattr(module, part)
        empty = torch.full_like(tensor, float("nan"))
        module.register_parameter(last, torch.nn.Parameter(empty))
    return root


def main(checkpoint: Path, folder: Path) -> None:
    """Compare; raises AssertionError at the first difference."""
    prepare()
    from tools.mtp_checkpoint.importing import import_head, layer_tensors
    from tools.mtp_checkpoint.native.layer import build_mtp_block
    from tools.mtp_checkpoint.source import HFDirectory

    with parallel_world() as groups:
        directory = HFDirectory.open(checkpoint)
        head = build_mtp_block(directory.config, groups=groups, device="cpu")
        import_head(directory, head, groups)
        ours = {name: tensor.detach() for name, tensor in layer_tensors(head).items()}
        bridge_class, state = import_bridge(folder)
        source = state.StateDict(state.SafeTensorsStateSource(checkpoint))
        pretrained = types.SimpleNamespace(
            state=source, config=None, model_name_or_path=str(checkpoint)
        )
        config = head.config.transformer
        model = skeleton(ours, config)
        bridge_class().load_weights_hf_to_megatron(pretrained, [model])
        theirs = dict(model.named_parameters())
        assert len(theirs) == len(ours)
        for name, tensor in ours.items():
            other = theirs[f"mtp.layers.0.{te_name(name)}"].detach()
            same = torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))
            assert same and tensor.isfinite().all(), f"{name} differs"
        print(f"equal {len(ours)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
