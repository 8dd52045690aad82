"""Time and peak memory of a call, on the CPU and on CUDA."""

from __future__ import annotations

import statistics
import time
from typing import Callable, Mapping

import torch

Call = Callable[[], object]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_clock = CLOCKS["wall"]


def use_clock(name: str) -> None:
    """Measure by "wall" time, or by this process's "cpu" time (on a machine that others use)."""
    global _clock
    _clock = CLOCKS[name]


def medians(calls: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of every call, measured in turn: A B C, A B C, …

    What slows the machine down for a while then falls on all of them, not on one. Run each once
    before: nothing here warms up.

    Args:
        calls: what to run, by name.
        repeats: runs of each.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(seconds_of(call))
    return {name: statistics.median(values) for name, values in seconds.items()}


def seconds_of(call: Call) -> float:
    """Seconds from the start of a call to the end of what it queued on the device."""
    synchronize()
    start = _clock()
    call()
    synchronize()
    return _clock() - start


def synchronize() -> None:
    """Wait for the GPU, if this process uses one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(call: Call) -> int:
    """Most bytes alive at one time during a call, above those alive when it starts.

    On CUDA, from the caching allocator's statistics. On the CPU, from the allocator's own record
    (torch.profiler): every allocation and release of torch, temporary buffers inside kernels
    included, and of nothing else. Both are exact and the same on every run.
    """
    if torch.cuda.is_available():
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    alive = peak = 0
    for _, size in sorted(_allocations(record), key=lambda event: event[0]):
        alive += size
        peak = max(peak, alive)
    return peak


def _allocations(record) -> list[tuple[int, int]]:
    """(time, bytes) of every allocation, and of every release as negative bytes."""
    found, waiting = [], list(record.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return found
