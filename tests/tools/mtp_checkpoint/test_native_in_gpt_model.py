"""A GPTModel with the same head reads the head's distributed checkpoint."""

import torch

from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from tests.support import parallel_world, prepare
from tests.support.device import device
from tests.tools.mtp_checkpoint.native_support import Kind, directory, imported
from tools.mtp_checkpoint.checkpoint import DIST, manifest, save_head
from tools.mtp_checkpoint.native.norm import ZeroCentredRMSNorm
from tools.mtp_checkpoint.native.spec import block_spec

prepare()

KIND = Kind("qwen3_5_moe", "per-expert", "bf16")


def test_a_gpt_model_loads_the_head_under_its_own_keys(tmp_path):
    with parallel_world() as groups:
        head = imported(KIND, groups)
        save_head(head, tmp_path, manifest(directory(KIND), KIND.family, KIND.layout, head.dtype))
        spec = block_spec(head.config, "local")
        layers = [spec.layer_specs[0].submodules.mtp_model_layer] * 2
        model = GPTModel(
            config=head.config.transformer,
            transformer_layer_spec=TransformerBlockSubmodules(layers, ZeroCentredRMSNorm),
            mtp_block_spec=spec,
            vocab_size=128,
            max_sequence_length=64,
            position_embedding_type="rope",
            rotary_percent=0.25,
            rotary_base=head.config.rotary_theta,
            share_embeddings_and_output_weights=False,
            pg_collection=groups,
        ).to(device())
        wanted = {
            name: entry
            for name, entry in model.sharded_state_dict().items()
            if name.startswith("mtp.")
        }
        loaded = dist_checkpointing.load(wanted, str(tmp_path / DIST))
        model.load_state_dict(loaded, strict=False)
        theirs = dict(model.mtp.named_parameters(prefix="mtp"))
        ours = dict(head.named_parameters())
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
