"""Trained heads go to rollout engines under the checkpoint's names: converters of miles 0.0.2.

    make clients && python -m pytest tests/examples/test_integrations_weights.py
"""

import types

import pytest

from tests.examples.clients import import_client, needs_client
from tests.examples.integration_support import tiny
from tests.support import parallel_world, prepare, run_ranks
from tests.tools.mtp_checkpoint.bridge_worker import te_name

prepare()
pytestmark = needs_client("miles")


def test_trained_heads_are_converted_under_the_names_that_rollout_engines_load():
    ((refusal, names, shapes),) = run_ranks(convert, 1)
    assert "mtp_model_layer" in refusal  # without the new name miles does not know the layer
    layer = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    layer += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    own = ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
    assert names == {f"mtp.layers.0.{x}" for x in layer} | {f"mtp.{x}.weight" for x in own}
    assert shapes["mtp.fc.weight"] == (32, 64)


def convert():
    import_client("miles")
    from miles.backends.megatron_utils.megatron_to_hf.qwen3_5 import convert_qwen3_5_to_hf

    from examples.integrations.mtp_slime import slime_name

    args = types.SimpleNamespace(
        hidden_size=32, num_attention_heads=4, num_query_groups=4, kv_channels=8, num_layers=2
    )
    shape = dict(add_bias_linear=False, gated_linear_unit=True, normalization="RMSNorm")
    with parallel_world() as groups:
        model = tiny(groups, mtp_num_layers=1, attention_output_gate=True, **shape)
        # As Transformer Engine's layers, which miles uses, name them.
        head = {
            "module.module." + te_name(name): parameter
            for name, parameter in model.named_parameters()
            if name.startswith("mtp.")
        }
        with pytest.raises(ValueError) as refused:
            for name, parameter in head.items():
                convert_qwen3_5_to_hf(args, name, parameter)
        converted = {}
        for name, parameter in head.items():
            converted.update(convert_qwen3_5_to_hf(args, slime_name(name), parameter))
        shapes = {name: tuple(tensor.shape) for name, tensor in converted.items()}
        return str(refused.value), set(converted), shapes
