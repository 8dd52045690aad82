"""Somebody else's importer agrees bit for bit: NVIDIA's megatron-bridge 0.6.2.

It pins other versions of half of what is installed here, so it lives in a folder of its own:

    make clients
    pytest tests/tools/mtp_checkpoint/test_megatron_bridge.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.clients import needs_client
from tools.clients import CLIENTS

ROOT = Path(__file__).resolve().parents[3]
FOLDER = CLIENTS["megatron-bridge"].folder


@needs_client("megatron-bridge")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["per-expert", "packed"])
def test_megatron_bridge_imports_the_same_head_bit_for_bit(tiny, layout, dtype):
    checkpoint = tiny("qwen3_5_moe", layout, dtype)
    module = "tests.tools.mtp_checkpoint.bridge_worker"
    command = [sys.executable, "-m", module, str(checkpoint), str(FOLDER)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "equal 30"
