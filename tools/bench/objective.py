"""Time and peak memory of the objective, forward and backward, over s, V, D and the mask.

Memory is counted above the inputs. Part of it are the gradients that backward must return, one like
the hidden states and one like a trained weight, whoever computes them; what is used beyond those is
what a chunk can bound.
"""

from __future__ import annotations

import functools
import itertools
from typing import Callable, Iterator

import torch

from tools.bench.counting import cuda_waits
from tools.bench.heads import Inputs, Objective, build_head
from tools.bench.results import Goal, Row
from tools.bench.sizes import Sizes
from tools.bench.timing import medians, peak_bytes
from tools.bench.traffic import SYNCS
from tools.bench.trees import Pair

TIME = "objective time"
MEMORY = "objective peak memory above its inputs"
EXTRA = "objective peak memory above its inputs and gradients"
# At `Sizes.at`, by supervised share.
TIME_GOALS = {1.0: Goal(0.50), 0.25: Goal(0.20), 0.05: Goal(0.08)}
MEMORY_GOAL = Goal(0.25)


def measure(pair: Pair, sizes: Sizes, tick: Callable[[str], None]) -> Iterator[Row]:
    """Rows of all cases, and of the isolated objective at the sizes with goals.

    Upstream's cost does not depend on the mask (it multiplies the finished losses), so it runs
    once per turn, beside ours with every mask.
    """
    for vocabulary in sizes.vocabularies:
        shape = vocabulary, sizes.hidden, sizes.dtype
        models = {tree.name: build_head(tree, pair, *shape) for tree in pair}
        for length, depths in itertools.product(sizes.lengths, sizes.depths):
            for isolated in (False, True) if (length, vocabulary) == sizes.at else (False,):
                kind = ", isolated" if isolated else ""
                tick(f"objective s={length} V={vocabulary} D={depths}{kind}")
                yield from _case(pair, sizes, models, length, vocabulary, depths, isolated)


def _case(pair, sizes, models, length, vocabulary, depths, isolated) -> Iterator[Row]:
    shape = (length, depths, sizes.hidden, vocabulary)
    inputs = {share: Inputs.random(*shape, share, sizes.dtype) for share in sizes.fractions}
    theirs = Objective(pair.upstream, models["upstream"], depths, isolated)
    ours = Objective(pair.ours, models["ours"], depths, isolated, chunk=sizes.chunk)
    calls = {"upstream": functools.partial(theirs, inputs[sizes.fractions[0]])}
    calls |= {str(share): functools.partial(ours, inputs[share]) for share in sizes.fractions}
    peaks = {}
    for name, call in list(calls.items()):  # also warms up
        call.func.release(*call.args)  # gradients of the case before, which would count as freed
        try:
            peaks[name] = peak_bytes(call)
        except torch.OutOfMemoryError:  # on a GPU; a row without upstream says so
            if name != "upstream":
                raise
            del calls[name]
            torch.cuda.empty_cache()
        call.func.release(*call.args)
    seconds = medians(calls, sizes.repeats)
    if torch.cuda.is_available():
        yield _waits(calls, sizes, f"s={length} V={vocabulary} D={depths}")
    goals = (length, vocabulary) == sizes.at
    weight = models["ours"].output_layer.weight
    returned = inputs[sizes.fractions[0]].hidden.nbytes + (0 if isolated else weight.nbytes)
    for share in sizes.fractions:
        kind = ", isolated" if isolated else ""
        name = f"s={length} V={vocabulary} D={depths}, {share:.0%} supervised{kind}"
        key = dict(s=length, V=vocabulary, D=depths, share=share, isolated=isolated)
        time_goal = TIME_GOALS.get(share) if goals else None
        memory_goal = MEMORY_GOAL if goals else None
        times = [_times(1e3, seconds.get(which)) for which in ("upstream", str(share))]
        yield Row(TIME, name, "ms", *times, time_goal, key)
        theirs_b, ours_b = peaks.get("upstream"), peaks[str(share)]
        for section, left_out in ((MEMORY, 0), (EXTRA, returned)):
            both = [_times(1e-6, None if b is None else b - left_out) for b in (theirs_b, ours_b)]
            yield Row(section, name, "MB", *both, memory_goal, key)


def _waits(calls: dict[str, Callable], sizes: Sizes, name: str) -> Row:
    """Host synchronisations as CUDA reports them."""
    waits = {which: cuda_waits(call) for which, call in calls.items()}
    both = waits.get("upstream"), waits[str(sizes.fractions[0])]
    return Row(SYNCS, f"objective, as CUDA reports, {name}", "", *both, Goal(0, "ours"))


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value
