"""The width that is on this machine what a model's is on a GPU.

Run: pytest tests/tools/bench/test_width.py
"""

import pytest
import torch
from tools.bench.roofline import Ceilings
from tools.bench.sizes import CPU_QUICK
from tools.bench.width import balanced


@pytest.mark.parametrize(
    "flops, bandwidth, width",
    [(200e12, 1e12, 2048), (12.5e9, 1e9, 128), (4.3e9, 1e9, 48), (1e6, 1e9, 16)],
    ids=["a GPU's own", "exact", "rounded up", "at least one step"],
)
def test_a_width_is_alike_where_operations_per_byte_are(flops, bandwidth, width):
    assert balanced(Ceilings(flops, bandwidth)) == width


def test_ceilings_of_this_machine_give_a_width():
    ceilings = Ceilings.of_sizes(CPU_QUICK, torch.device("cpu"))
    assert balanced(ceilings) % 16 == 0 < balanced(ceilings)
