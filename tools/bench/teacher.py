"""Cost of objectives with the policy as teacher, beside ours with the cross-entropy alone.

Both columns are of the patched tree, in chunks of the same size and with the same supervised rows:
what is compared is the price of the teacher. No release has such objectives.
"""

from __future__ import annotations

import functools
from typing import Callable, Iterator

from tools.bench.heads import Inputs, Objective, build_head
from tools.bench.results import Goal, Row
from tools.bench.sizes import Sizes
from tools.bench.timing import medians, peak_bytes
from tools.bench.trees import Pair

TIME = "time with the policy as teacher (left: ours with ce)"
EXTRA = "peak memory with a teacher above inputs and gradients (left: ours with ce)"
TIME_GOAL = Goal(2.2)
OBJECTIVES = ("kl", "tv", "ce+kl")
_SHARE = 0.25  # Supervised, as in a batch of prompts and answers.


def measure(pair: Pair, sizes: Sizes, tick: Callable[[str], None]) -> Iterator[Row]:
    """Time at the sizes with goals, isolated and not; memory over s."""
    length, vocabulary = sizes.at
    model = build_head(pair.ours, pair, vocabulary, sizes.hidden, sizes.dtype)
    for isolated in (False, True):
        tick(f"teacher s={length} V={vocabulary}{' isolated' if isolated else ''}")
        yield from _times(pair, sizes, model, isolated)
    for length in sizes.lengths:
        tick(f"teacher memory s={length} V={vocabulary}")
        yield from _memory(pair, sizes, model, length)


def _objectives(pair: Pair, sizes: Sizes, model, isolated: bool) -> dict[str, Objective]:
    make = functools.partial(Objective, pair.ours, model, 1, isolated, sizes.chunk)
    return {name: make(name) for name in ("ce", *OBJECTIVES)}


def _times(pair: Pair, sizes: Sizes, model, isolated: bool) -> Iterator[Row]:
    length, vocabulary = sizes.at
    inputs = Inputs.random(length, 1, sizes.hidden, vocabulary, _SHARE, sizes.dtype)
    objectives = _objectives(pair, sizes, model, isolated)
    calls = {name: functools.partial(call, inputs) for name, call in objectives.items()}
    for call in calls.values():  # warms up
        call()
    seconds = medians(calls, sizes.repeats)
    objectives["ce"].release(inputs)
    kind = ", isolated" if isolated else ""
    for name in OBJECTIVES:
        text = f"{name}, s={length} V={vocabulary} D=1, {_SHARE:.0%} supervised{kind}"
        key = dict(s=length, V=vocabulary, D=1, share=_SHARE, isolated=isolated, what=name)
        yield Row(TIME, text, "ms", 1e3 * seconds["ce"], 1e3 * seconds[name], TIME_GOAL, key)


def _memory(pair: Pair, sizes: Sizes, model, length: int) -> Iterator[Row]:
    vocabulary = sizes.at[1]
    inputs = Inputs.random(length, 1, sizes.hidden, vocabulary, _SHARE, sizes.dtype)
    returned = inputs.hidden.nbytes + model.output_layer.weight.nbytes
    peaks = {}
    for name, call in _objectives(pair, sizes, model, isolated=False).items():
        if name == "ce+kl":  # as kl
            continue
        call.release(inputs)
        peaks[name] = 1e-6 * (peak_bytes(functools.partial(call, inputs)) - returned)
        call.release(inputs)
    for name in [name for name in OBJECTIVES if name in peaks]:
        text = f"{name}, s={length} V={vocabulary} D=1, {_SHARE:.0%} supervised"
        key = dict(s=length, V=vocabulary, D=1, share=_SHARE, isolated=False, what=name)
        yield Row(EXTRA, text, "MB", peaks["ce"], peaks[name], key=key)
