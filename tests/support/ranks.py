"""Run a function on several ranks, started from the test process itself.

`run_ranks` forks the test process, which has already imported Megatron: a case of 2 to 4 ranks
takes about a second, where a torchrun launch takes more than ten. Rules that keep this safe:

* The test process must hold no process group when it forks; `run_ranks` raises if it does. A
  single-rank `parallel_world` inside the test process is fine: it ends with its ``with`` block.
  Groups that outlive theirs somewhere are kept alive in the ranks, where ending them would wait
  for threads that were not forked.
* A GPU that the process has used cannot be used in a fork, so with a GPU the ranks come from a
  clean server process. They import the rank function by name, so it must be a module-level
  function, and its arguments must be picklable. Both are checked on the CPU too.
* Ranks meet through files in a temporary directory: no ports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from tests.support.device import environment_for, has_gpu, prepare
from tests.support.failures import RankFailure, failure_report, wait_for_stacks

STORE_VARIABLE = "MTP_TEST_STORE"  # where the ranks of a case keep their rendezvous files
# Every group of this process that is still alive: `parallel_world` adds those of its worlds.
living_groups: weakref.WeakSet = weakref.WeakSet()
_inherited: list[Any] = []
_SERVER_START_S = 120.0  # importing torch and Megatron in every rank, on a busy machine


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list:
    """Run ``fn(*args)`` on every rank of a new world; return the results in rank order.

    ``fn`` finds RANK, LOCAL_RANK and WORLD_SIZE in the environment, and usually opens one or more
    `parallel_world`. Tensors in the result come back detached, on the CPU.

    Args:
        fn: A module-level function.
        world_size: Number of ranks, at least 1.
        args: Picklable arguments, the same for every rank.
        timeout: Seconds after which the case is ended.

    Raises:
        AssertionError: A rank raised (with its traceback; the others are ended at once), died, or
            did not end in time (with the stacks of every rank that was still running).
        ValueError: ``fn`` is not a module-level function or ``world_size`` is below 1.
        RuntimeError: This process holds a process group.
    """
    _check_call(fn, world_size)
    context, extra = _start_method()
    environment = {"WORLD_SIZE": str(world_size), **environment_for(world_size)}
    # The function travels pickled: unpickling may import the test module, which prepares the
    # device, and must come after the rank's environment is set.
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        environment[STORE_VARIABLE] = name
        processes = [
            context.Process(target=_rank_main, args=(name, rank, environment, payload))
            for rank in range(world_size)
        ]
        try:
            _start(processes)
            _wait(processes, timeout + extra)
            failures = _failures(processes, directory, timeout)
        finally:
            _kill(processes)
        outcomes = [_outcome(directory, rank) for rank in range(world_size)]
        _skip_if_asked(outcomes)
        if failures:
            raise AssertionError(failure_report(fn.__qualname__, world_size, failures))
        return [outcome["value"] for outcome in outcomes]


def _check_call(fn: Callable[..., Any], world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size must be at least 1, got {world_size}")
    inner = fn.func if isinstance(fn, functools.partial) else fn
    if "<" in getattr(inner, "__qualname__", "<unknown>"):
        raise ValueError(
            f"run_ranks: expected a module-level function, got {fn!r}. Ranks on a GPU machine "
            "import it by name, so lambdas and functions defined inside a test do not work; "
            "pass what it needs as arguments."
        )
    if not has_gpu() and dist.is_initialized():
        raise RuntimeError(
            "run_ranks: this process holds a process group, and its threads do not survive a "
            "fork. Leave the `with parallel_world()` block (or destroy the group) first."
        )


def _start_method():
    """The multiprocessing context, and the seconds its start may add to the timeout."""
    if not has_gpu():
        return multiprocessing.get_context("fork"), 0.0
    context = multiprocessing.get_context("forkserver")
    if importlib.util.find_spec("transformer_engine") is None:
        # The server imports Megatron once. It must not touch the GPU doing so, and counting
        # devices through NVML does not; importing Transformer Engine would.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        context.set_forkserver_preload(["tests.support.hybrid_spec"])
    return context, _SERVER_START_S


def _start(processes: list) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of any thread at a fork. Those of a process without a group are idle
        # OpenMP workers, and ranks use one thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()


def _wait(processes: list, timeout: float) -> None:
    """Return when all ranks have ended, one has failed, or the time is up."""
    deadline = time.monotonic() + timeout
    while running := [p for p in processes if p.is_alive()]:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        multiprocessing.connection.wait([p.sentinel for p in running], timeout=left)
        if any(p.exitcode for p in processes):
            # Ranks that waited for the failed one fail next. It has written its traceback before
            # it closed its connections, so a moment is enough to see who was first.
            time.sleep(0.1)
            return


def _failures(processes: list, directory: Path, timeout: float) -> list[RankFailure]:
    """What went wrong, ranks that raised first, in the order in which they failed."""
    raised, died = [], []
    for rank, process in enumerate(processes):
        outcome = _outcome(directory, rank)
        if outcome is not None and outcome["kind"] == "error":
            raised.append((outcome["time"], RankFailure(rank, "raised", outcome["value"])))
        elif process.exitcode:
            stacks = (directory / f"stacks.{rank}").read_text()
            died.append(RankFailure(rank, f"died with exit code {process.exitcode}", stacks))
    failures = died + [failure for _, failure in sorted(raised, key=lambda pair: pair[0])]
    if failures or not any(process.is_alive() for process in processes):
        return failures
    running = {rank: p.pid for rank, p in enumerate(processes) if p.is_alive()}
    for pid in running.values():
        os.kill(pid, signal.SIGUSR1)
    what = f"did not end within {timeout:g} s; it was here"
    stacks = wait_for_stacks({rank: directory / f"stacks.{rank}" for rank in running})
    return [RankFailure(rank, what, text) for rank, text in stacks.items()]


def _kill(processes: list) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()


def _outcome(directory: Path, rank: int) -> dict | None:
    path = directory / f"outcome.{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _skip_if_asked(outcomes: list[dict | None]) -> None:
    """Pass ``pytest.skip`` in a rank on to the test."""
    for outcome in outcomes:
        if outcome is not None and outcome["kind"] == "skip":
            import pytest

            pytest.skip(outcome["value"])


def _rank_main(name: str, rank: int, environment: dict, payload: bytes) -> None:
    """The life of one rank: run, leave an outcome file, exit without any cleanup of the parent."""
    directory = Path(name)
    # Never finalise what was forked from the parent: its threads are not here.
    gc.freeze()
    _inherited.extend(living_groups)
    if (parallel_state := sys.modules.get("megatron.core.parallel_state")) is not None:
        _inherited.extend(vars(parallel_state).values())
    stacks = open(directory / f"stacks.{rank}", "w")
    faulthandler.cancel_dump_traceback_later()  # of the test runner
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        if "CUDA_VISIBLE_DEVICES" not in environment and not has_gpu():
            raise RuntimeError("the GPU was used before this rank was forked from its server")
        prepare()
        fn, args = pickle.loads(payload)
        outcome = {"kind": "result", "value": pytree.tree_map(_detached, fn(*args))}
        pickle.dump(outcome, io.BytesIO())
    except BaseException as error:  # noqa: BLE001 - a rank reports whatever ended it
        skipped = type(error).__name__ == "Skipped"
        text = str(error) if skipped else traceback.format_exc()
        outcome = {"kind": "skip" if skipped else "error", "value": text}
    outcome["time"] = time.monotonic()
    partial = directory / f"outcome.{rank}.partial"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(directory / f"outcome.{rank}")
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0 if outcome["kind"] == "result" else 1)


def _detached(value: Any) -> Any:
    return value.detach().cpu() if torch.is_tensor(value) else value
