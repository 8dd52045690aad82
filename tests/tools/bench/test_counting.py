"""The counters see what they are for, and nothing else.

Run: pytest tests/tools/bench/test_counting.py
"""

import pytest
import torch
import torch.distributed as dist
from tools.bench.counting import CountTraffic, FindSyncs, cuda_waits
from tools.bench.timing import medians, peak_bytes

from tests.support import has_gpu, parallel_world, prepare, run_ranks

prepare()

WAITS = {
    "item": "x.sum().item()",
    "int": "int(x[0])",
    "slice": "x[: n]",
    "truth": "bool((x > 0).all())",
    "tolist": "x.tolist()",
    "numpy": "x.numpy()",
    "cpu": "x.cpu()",
    "to": "x.to('cpu')",
    "nonzero": "torch.nonzero(x)",
    "where": "torch.where(x > 1)",
    "boolean index": "x[x > 1]",
    "boolean assignment": "x.clone()[x > 1] += 1",
    "masked_select": "x.masked_select(x > 1)",
    "unique": "x.unique()",
    "equal": "torch.equal(x, x)",
    "blocking copy": "h = torch.empty(3); h.copy_(x); h.numpy()",
}
RUNS_ON = {
    "where of three": "torch.where(x > 1, x, 0)",
    "masked_fill": "x.masked_fill(x > 1, 0)",
    "index_select": "x.index_select(0, n.view(1))",
    "gather": "x[n.view(1)]",
    "sort": "torch.argsort(x, stable=True)",
    "python slice": "x[:2]",
    "dtype": "x.to(torch.float64)",
    "assertion": "torch._assert_async((x > 0).all(), 'no')",
    "pinned copy": "x.to('cpu', non_blocking=True)",
    "pinned copy, read": "h = torch.empty(3); h.copy_(x, non_blocking=True); h.numpy()",
}


def _run_as(file: str, code: str) -> FindSyncs:
    """What is found when ``code`` stands in a file of that name."""
    values = dict(x=torch.tensor([1.0, 2.0, 3.0]), n=torch.tensor(2), torch=torch)
    with FindSyncs() as found:
        exec(compile(code, file, "exec"), values)
    return found


class TestHostSynchronisations:
    """Found in the heads' code, wherever it is called from."""

    @pytest.mark.parametrize("code", WAITS.values(), ids=WAITS)
    def test_what_waits_for_a_value_is_found_with_its_place(self, code):
        found = _run_as("x/multi_token_prediction.py", code)
        assert found.total >= 1
        assert all(place.startswith("multi_token_prediction.py:1 ") for place in found.places)

    @pytest.mark.parametrize("code", RUNS_ON.values(), ids=RUNS_ON)
    def test_what_runs_on_without_waiting_is_not(self, code):
        assert _run_as("x/mtp_objective/shift.py", code).total == 0

    @pytest.mark.parametrize("file", ["x/gpt_model.py", "x/transformer/transformer_layer.py"])
    def test_waits_of_other_code_are_not_counted(self, file):
        assert _run_as(file, "x.tolist(); x.sum().item()").total == 0

    def test_a_backward_written_in_the_heads_code_is_looked_at_too(self):
        code = (
            "class Reads(torch.autograd.Function):\n"
            "    forward = staticmethod(lambda ctx, x: x.clone())\n"
            "    backward = staticmethod(lambda ctx, g: g * g.sum().item())\n"
        )
        values = dict(torch=torch)
        exec(compile(code, "x/mtp_objective/chunked.py", "exec"), values)
        output = values["Reads"].apply(torch.ones(2, requires_grad=True))
        with FindSyncs() as found:
            output.sum().backward()
        assert dict(found.places) == {"chunked.py:3 _local_scalar_dense": 1}


@pytest.mark.skipif(not has_gpu(), reason="CUDA's own report needs a GPU")
def test_cuda_reports_what_waits_for_it():
    x = torch.ones(8, device="cuda")
    assert cuda_waits(lambda: x * 2) == 0
    assert cuda_waits(lambda: (x.sum().item(), x[x > 0])) >= 2


def _send_everything() -> tuple[dict, int, int]:
    with parallel_world(cp=2) as groups:
        x, group = torch.ones(4), groups.cp
        with CountTraffic() as counted:
            dist.all_reduce(x, group=group)
            dist.all_reduce(x, group=groups.tp)  # one rank
            dist.all_gather_into_tensor(torch.empty(8), x, group=group)
            dist.all_gather([torch.empty(4), torch.empty(4)], x, group=group)
            dist.reduce_scatter_tensor(torch.empty(2), x, group=group)
            peer = 1 - group.rank()
            if peer:
                dist.send(x, peer)
                dist.recv(x, peer)
            else:
                dist.recv(x, peer)
                dist.isend(x, peer).wait()
        dist.all_reduce(x, group=group)  # outside
        return dict(counted.traffic.calls), counted.traffic.bytes, counted.traffic.collectives


def test_every_call_that_leaves_the_rank_is_counted_with_what_it_hands_over():
    for calls, sent, collectives in run_ranks(_send_everything, 2):
        assert sum(calls.values()) == 6 and calls["send"] == calls["recv_"] == 1
        assert collectives == 4
        assert sent == 5 * 4 * 4  # five times four float32; what is received is the peer's


class TestMemoryAndTime:
    """`peak_bytes` and `medians`."""

    def test_the_peak_is_what_is_alive_at_one_time(self):
        def call():
            first = torch.empty(1000)
            del first
            second, third = torch.empty(500), torch.empty(700)
            return second, third

        want = 4 * 1200
        assert want <= peak_bytes(call) <= want + 2 * 64
        assert peak_bytes(call) == peak_bytes(call)

    def test_what_was_there_before_does_not_count(self):
        before = torch.empty(100_000)
        assert peak_bytes(lambda: before.add_(1)) < 1000

    def test_memory_that_autograd_keeps_counts_until_backward(self):
        x = torch.ones(1000, requires_grad=True)

        def call():
            x.grad = None
            (x.exp() * 2.0).sum().backward()

        assert peak_bytes(call) >= 2 * 4000

    def test_calls_are_measured_in_turn(self):
        order = []
        calls = {name: lambda name=name: order.append(name) for name in "AB"}
        found = medians(calls, 3)
        assert order == list("ABABAB")
        assert set(found) == {"A", "B"} and min(found.values()) > 0
