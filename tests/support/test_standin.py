"""Tests of the CPU stand-in. Run: ``pytest tests/support/test_standin.py``.

Beside a GPU the stand-in does not install, and most of these are skipped.
"""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.support import (
    device,
    fp64_cross_entropy,
    has_gpu,
    parallel_world,
    prepare,
    relative_error,
    standin,
)

prepare()

without_gpu = pytest.mark.skipif(has_gpu(), reason="the stand-in refuses to install beside a GPU")


class TestStandIn:
    """The replacements of torch.cuda."""

    def test_refuses_beside_a_gpu_and_replaces_nothing(self):
        script = """
            import torch
            from tests.support import standin
            torch.cuda.is_available = lambda: True
            torch.cuda.device_count = lambda: 1
            before = torch.cuda.synchronize, torch.zeros, torch.Tensor.cuda
            try:
                standin.install()
            except RuntimeError as error:
                assert "refuses to install" in str(error), error
                assert before == (torch.cuda.synchronize, torch.zeros, torch.Tensor.cuda)
                assert not standin.installed()
                print("refused")
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", textwrap.dedent(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == "refused", done.stderr

    @without_gpu
    def test_installs_once(self):
        before = torch.cuda.synchronize, torch.zeros, torch.Tensor.cuda
        standin.install()
        assert before == (torch.cuda.synchronize, torch.zeros, torch.Tensor.cuda)
        assert standin.installed()

    @without_gpu
    def test_cuda_tensors_are_cpu_tensors(self):
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.tensor([1], pin_memory=True).cuda().tolist() == [1]
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"

    @without_gpu
    def test_device_contexts_still_reach_the_replaced_factories(self):
        with torch.device("meta"):
            assert torch.empty(2).is_meta and torch.tensor([1.0]).is_meta

    @without_gpu
    def test_cuda_random_state_is_saved_and_restored(self):
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)


def _cross_entropy_error(inside: bool) -> float:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    logits = torch.randn(5, 2, 64, dtype=torch.float64, device=device())
    target = torch.arange(10, device=device()).view(5, 2)
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none"
    )
    with parallel_world():
        if not inside:
            return relative_error(vocab_parallel_cross_entropy(logits, target).flatten(), want)
        with fp64_cross_entropy():
            return relative_error(vocab_parallel_cross_entropy(logits, target).flatten(), want)


def test_cross_entropy_keeps_float64_only_inside_the_context():
    assert _cross_entropy_error(inside=True) < 1e-15
    assert _cross_entropy_error(inside=False) > 1e-9
