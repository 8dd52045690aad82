"""Megatron-Bridge 0.6.2 sets up and exports heads through our adapter.

    make clients && python -m pytest tests/examples/test_integrations_megatron_bridge.py
"""

import subprocess
import sys
from pathlib import Path

from tests.examples.clients import needs_client
from tools.clients import CLIENTS

pytestmark = needs_client("megatron-bridge")
ROOT = Path(__file__).resolve().parents[2]


def test_the_heads_alone_are_exported_under_the_names_and_with_the_bits_of_the_checkpoint(tmp_path):
    from tools.tiny_checkpoint import make

    checkpoint = make(tmp_path / "model", family="qwen3_5_moe", layout="per-expert", dtype="bf16")
    module, folder = "tests.examples.bridge_export_worker", CLIENTS["megatron-bridge"].folder
    command = [sys.executable, "-m", module, str(checkpoint), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "exported 41"
