"""The head of Transformer Engine's modules, grouped GEMM included, against transformers' layers."""

import pytest
import torch

from tests.support import parallel_world, prepare
from tests.support.device import has_transformer_engine
from tests.tools.mtp_checkpoint.native_support import Kind, directory, imported, reference
from tools.mtp_checkpoint.checkpoint import load_head, manifest, save_head
from tools.mtp_checkpoint.comparing import compare
from tools.mtp_checkpoint.verify_rows import random_rows

prepare()

# Its float32 products round their inputs to TF32's 10 bits; a mistake is off by 0.2 and more.
_TF32 = 2e-2


@pytest.mark.skipif(
    not has_transformer_engine(), reason="Transformer Engine is not installed, or there is no GPU"
)
@pytest.mark.parametrize(
    "kind", [Kind("qwen3_5_moe", "packed", "fp32"), Kind("qwen3_5", "dense", "fp32")], ids=str
)
def test_it_loads_the_local_heads_checkpoint_and_computes_the_same(kind, tmp_path):
    source = directory(kind)
    rows = random_rows(source, 4, 64, 0)
    with parallel_world() as groups:
        contents = manifest(source, kind.family, kind.layout, torch.float32)
        save_head(imported(kind, groups), tmp_path / "ckpt", contents)
        head = load_head(tmp_path / "ckpt", groups=groups, implementation="te")
        comparison = compare(head.eval(), reference(kind), rows)
    assert comparison.hidden_delta <= _TF32
    assert comparison.argmax_agreement >= 0.9
