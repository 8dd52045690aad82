"""Exports a head with Megatron-Bridge's own mappings through our adapter, as it was imported.

    python -m tests.examples.bridge_export_worker CHECKPOINT FOLDER_OF_THE_BRIDGE

A process of its own: the bridge's stubs must not reach other tests. See
tests/tools/mtp_checkpoint/bridge_worker.py, whose skeleton of a model it uses.
"""

from __future__ import annotations

import sys
import types
from functools import partial
from pathlib import Path

import torch

from tests.support import parallel_world, prepare
from tests.tools.mtp_checkpoint.bridge_worker import import_bridge, skeleton


def main(checkpoint: Path, folder: Path) -> None:
    """Isolate a provider's heads; import, export and compare; prints the number of tensors."""
    prepare()
    from tools.mtp_checkpoint.importing import layer_tensors
    from tools.mtp_checkpoint.native.layer import build_mtp_block
    from tools.mtp_checkpoint.source import HFDirectory

    with parallel_world() as groups:
        head = build_mtp_block(HFDirectory.open(checkpoint).config, groups=groups, device="cpu")
        bridge_class, state = import_bridge(folder)
        source = state.StateDict(state.SafeTensorsStateSource(checkpoint))
        pretrained = types.SimpleNamespace(
            state=source, config=None, model_name_or_path=str(checkpoint)
        )
        ours = {name: tensor.detach() for name, tensor in layer_tensors(head).items()}
        model = skeleton(ours, head.config.transformer)
        norm = torch.nn.Parameter(torch.ones(head.config.transformer.hidden_size))
        model.decoder = torch.nn.Module()
        model.decoder.final_layernorm = type("TENorm", (torch.nn.Module,), {})()
        model.decoder.final_layernorm.weight = norm  # of the policy: not to be exported
        bridge = bridge_class()
        bridge.load_weights_hf_to_megatron(pretrained, [model])
        # What AutoBridge makes of these two methods, which needs a whole model.
        auto = types.SimpleNamespace(
            get_conversion_tasks=partial(bridge.build_conversion_tasks, pretrained),
            export_hf_weights=partial(export, bridge, pretrained),
        )
        from examples.integrations.mtp_megatron_bridge import head_weights

        isolate_a_provider()
        assert any("final_layernorm" in t.param_name for t in auto.get_conversion_tasks([model]))
        exported = dict(head_weights(auto, [model]))
        wanted = {name for name in source.keys() if name.startswith("mtp.")}
        assert set(exported) == wanted, set(exported) ^ wanted
        for name, tensor in exported.items():
            assert torch.equal(tensor.to(source[name].dtype), source[name]), name
        print(f"exported {len(exported)}")


def isolate_a_provider() -> None:
    """The bridge's own provider takes the fields and passes Megatron's checks."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    from examples.integrations.mtp_megatron_bridge import isolate_heads

    shape = dict(num_layers=2, hidden_size=32, num_attention_heads=4)
    provider = isolate_heads(GPTModelProvider(mtp_num_layers=1, **shape), 0.3)
    provider.finalize()
    assert provider.mtp_isolated_loss and provider.mtp_detach_heads
    assert provider.mtp_loss_scaling_factor == 0.3
    try:
        isolate_heads(GPTModelProvider(**shape))
    except ValueError as error:
        assert "mtp_num_layers is None" in str(error)
    else:
        raise AssertionError("a model without heads was not refused")


def export(bridge, pretrained, model, show_progress, conversion_tasks):
    """AutoBridge.export_hf_weights."""
    return bridge.stream_weights_megatron_to_hf(
        model, pretrained, show_progress=show_progress, conversion_tasks=conversion_tasks
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
