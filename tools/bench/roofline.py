"""The two ceilings of the machine, and how far each operator of the objective is from them.

An operator that does F floating-point operations and moves B bytes cannot be faster than
max(F / peak, B / bandwidth). Its distance is the time it took over that bound. F is torch's own
count (`torch.utils.flop_counter`), B the size of the tensors it is given and returns, each once.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tools.bench.heads import Inputs, Objective, build_head
from tools.bench.results import Row
from tools.bench.sizes import K, Sizes
from tools.bench.timing import peak_bytes, seconds_of, synchronize
from tools.bench.trees import Pair

CEILINGS, OPERATORS = "ceilings", "operators of the objective, time over bound"
_RUNS = 20  # the best of them: two seconds, in which a busy machine is idle for once
_SHARE = 1.0
_LEAST = 0.02  # of the time; operators with less are left out


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the machine can do: FLOP/s of a matrix product, bytes/s of a copy (read + written)."""

    flops: float
    bandwidth: float

    @classmethod
    def measure(cls, dtype: torch.dtype, size: int, copied: int, device) -> Ceilings:
        """The best of some runs each.

        Args:
            size: edge of the square matrices.
            copied: bytes of the copied tensor; far more than the caches hold.
        """
        a = torch.randn(size, size, device=device).to(dtype)
        b, product = a.t().contiguous(), torch.empty_like(a)
        source = torch.ones(copied, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        multiply = _best(lambda: torch.mm(a, b, out=product))
        copy = _best(lambda: target.copy_(source))
        return cls(2 * size**3 / multiply, 2 * copied / copy)

    @classmethod
    def of_sizes(cls, sizes: Sizes, device) -> Ceilings:
        """`measure` with matrices and a copy that suit the machine and the sizes."""
        size, copied = (8192, 4 << 30) if device.type == "cuda" else (1536, 256 << 20)
        if sizes.at[0] < K:  # quick
            size, copied = 128, 1 << 20
        return cls.measure(sizes.dtype, size, copied, device)

    def bound(self, flops: float, moved: float) -> float:
        """Seconds below which this work cannot be done."""
        return max(flops / self.flops, moved / self.bandwidth)


@dataclasses.dataclass
class Work:
    """All calls of one operator: how many, seconds, and the sum of their bounds."""

    calls: int = 0
    seconds: float = 0.0
    bound: float = 0.0


class TimeOperators(TorchDispatchMode):
    """Times every operator inside the block by itself, waiting for the device after each.

    Attributes:
        work: by operator.
    """

    def __init__(self, ceilings: Ceilings) -> None:
        super().__init__()
        self.work: dict[str, Work] = collections.defaultdict(Work)
        self._ceilings = ceilings

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = None

        def call():
            nonlocal result
            result = func(*args, **(kwargs or {}))

        seconds = seconds_of(call)
        if func.is_view or func.namespace != "aten":
            return result
        found = self.work[func._schema.name.split("::")[1]]
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
        found.calls += 1
        found.seconds += seconds
        found.bound += self._ceilings.bound(flops, _bytes((args, kwargs, result)))
        return result


def measure(pair: Pair, sizes: Sizes, tick: Callable[[str], None]) -> Iterator[Row]:
    """Rows of the ceilings, of the whole objective and of its operators, upstream's and ours."""
    from tests.support import device

    tick("ceilings")
    ceilings = Ceilings.of_sizes(sizes, device())
    for name, unit, value in (
        (f"matrix product, {sizes.dtype}".replace("torch.", ""), "GFLOP/s", ceilings.flops / 1e9),
        ("memory, read + written", "GB/s", ceilings.bandwidth / 1e9),
    ):
        yield Row(CEILINGS, name, unit, None, value, key=dict(ceiling=unit))
    length, vocabulary = sizes.at
    inputs = Inputs.random(length, 1, sizes.hidden, vocabulary, _SHARE, sizes.dtype)
    work = {}
    for tree in pair:
        tick(f"operators of the objective, {tree.name}")
        model = build_head(tree, pair, vocabulary, sizes.hidden, sizes.dtype)
        objective = Objective(tree, model, 1, chunk=sizes.chunk)
        try:
            peak_bytes(lambda: objective(inputs))
            with TimeOperators(ceilings) as timed:
                objective(inputs)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        finally:
            objective.release(inputs)
        work[tree.name] = timed.work
        work[tree.name]["all operators"] = _sum(timed.work)
    yield from _rows(work)


def _rows(work: dict[str, dict[str, Work]]) -> Iterator[Row]:
    """Time over bound of ours' largest operators and their share of the time."""
    ours, total = work["ours"], work["ours"]["all operators"].seconds
    for name in sorted(ours, key=lambda name: ours[name].seconds, reverse=True):
        if ours[name].seconds < _LEAST * total:
            continue
        theirs = work.get("upstream", {}).get(name)
        share = f"{ours[name].seconds / total:.0%} of ours, {ours[name].calls} calls"
        both = [None if one is None else one.seconds / one.bound for one in (theirs, ours[name])]
        yield Row(OPERATORS, f"{name} ({share})", "", *both, key=dict(operator=name))


def _sum(work: dict[str, Work]) -> Work:
    parts = list(work.values())
    return Work(*(sum(getattr(part, name) for part in parts) for name in vars(Work())))


def _best(call: Callable[[], object]) -> float:
    call()
    synchronize()
    return min(seconds_of(call) for _ in range(_RUNS))


def _bytes(values) -> int:
    """Bytes of the distinct tensors in nested arguments and results."""
    tensors = [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)]
    sizes = {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}
    return sum(sizes.values())
