"""Import and export hold a rank's parameters once, and no second copy of the experts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Tensors in transit (16 MB when files are copied) and what the allocator keeps. A second copy of
# the gate and up projections alone, as Megatron's own writer and loader make it, is 201 MB.
SLACK = 64 << 20


def measured(verb: str, folder: Path) -> dict[str, int]:
    """What a worker of its own prints for a verb."""
    command = [sys.executable, "-m", "tests.tools.mtp_checkpoint.memory_worker", verb, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_head_is_in_memory_once_while_it_is_imported_and_exported(tmp_path):
    try:
        sizes = measured("make", tmp_path)
        imported, exported = measured("import", tmp_path), measured("export", tmp_path)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)  # a gigabyte
    whole = sizes["parameters"]
    half = whole - sizes["experts"] // 2
    assert whole > 300_000_000
    assert whole < imported["1"] <= whole + SLACK
    assert half < imported["2"] <= half + SLACK
    assert whole < exported["1"] <= whole + SLACK
