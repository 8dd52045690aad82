"""Launch a script on several ranks with torchrun, the way users do.

A launch takes 10 to 20 seconds, most of it imports: use `run_ranks` for unit tests, and this for
the functional ones.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Mapping, Sequence

from tests.support.device import environment_for
from tests.support.failures import RankFailure, failure_report
from tests.support.worker import RESULT_VARIABLE

_LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused")
_DUMP_S = 2.0


def launch(
    script_or_module: str | Path,
    nproc: int,
    args: Sequence[Any] = (),
    timeout: float = 180.0,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run ``script_or_module`` on ``nproc`` ranks of this machine, on a free port.

    Args:
        script_or_module: Path of a script (``.py``), or a dotted module name.
        nproc: Number of ranks.
        args: Passed on, as strings.
        timeout: Seconds after which the launch is ended.
        env: Environment variables on top of this process's own.

    Returns:
        What `tests.support.worker.main` left on rank 0, or None when the script does not use it.

    Raises:
        AssertionError: A rank failed (with the end of its log, its traceback), or the launch did
            not end in time (with the stacks of every rank).
    """
    with tempfile.TemporaryDirectory(prefix="torchrun-") as name:
        directory = Path(name)
        command = _command(script_or_module, nproc, args, directory)
        output = directory / "torchrun.log"
        with output.open("w") as log:
            launcher = subprocess.Popen(
                command,
                env=_environment(nproc, directory, env),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_no_core_files,
            )
        try:
            code = launcher.wait(timeout)
            failures = _failed_ranks(directory, output) if code else []
        except subprocess.TimeoutExpired:
            _dump_stacks(launcher.pid)
            failures = _hanging_ranks(directory, output, timeout)
        finally:
            _kill_tree(launcher)
        if failures:
            raise AssertionError(failure_report(f"torchrun {script_or_module}", nproc, failures))
        result = directory / "result.json"
        return json.loads(result.read_text()) if result.exists() else None


def _command(
    script_or_module: str | Path, nproc: int, args: Sequence[Any], directory: Path
) -> list[str]:
    target = [str(script_or_module)]
    if not target[0].endswith(".py"):
        target.insert(0, "--module")
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(nproc), "--log-dir", str(directory / "ranks")),
        *("--redirects", "3"),
        *target,
        *map(str, args),
    ]


def _environment(nproc: int, directory: Path, env: Mapping[str, str] | None) -> dict[str, str]:
    """This process's environment, import path included, and what makes a launch debuggable."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a fatal signal writes the stacks of all threads to the log
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        RESULT_VARIABLE: str(directory / "result.json"),
        **environment_for(nproc),
        **(env or {}),
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return environment


def _no_core_files() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _rank_logs(directory: Path) -> dict[int, str]:
    """The end of every rank's standard error, in rank order."""
    logs = {int(p.parent.name): p for p in directory.glob("ranks/*/attempt_*/*/stderr.log")}
    return {rank: logs[rank].read_text(errors="replace") for rank in sorted(logs)}


def _failed_ranks(directory: Path, output: Path) -> list[RankFailure]:
    """The ranks whose log ends in a traceback, those that only lost a peer last."""
    failures = []
    for rank, text in _rank_logs(directory).items():
        start = text.rfind("Traceback (most recent call last)")
        fatal = text.rfind("Fatal Python error")
        if max(start, fatal) >= 0:
            failures.append(RankFailure(rank, "raised", text[max(start, fatal) :]))
    failures.sort(key=lambda f: any(words in f.detail for words in _LOST_PEER))
    return failures or [RankFailure(0, "or the launcher failed", output.read_text())]


def _hanging_ranks(directory: Path, output: Path, timeout: float) -> list[RankFailure]:
    what = f"did not end within {timeout:g} s; it was here"
    failures = []
    for rank, text in _rank_logs(directory).items():
        start = text.rfind("Fatal Python error: Aborted")
        stacks, _, _ = text[max(start, 0) :].partition("\nExtension modules:")
        failures.append(RankFailure(rank, what, stacks))
    return failures or [RankFailure(0, "did not start", output.read_text())]


def _children(pid: int) -> list[int]:
    """All living descendants of a process, parents first."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in map(int, path.read_text().split()):
                found += [child, *_children(child)]
        except OSError:  # it has ended meanwhile
            continue
    return found


def _dump_stacks(launcher: int) -> None:
    """Abort every worker, so that it writes its stacks; the launcher is stopped meanwhile."""
    os.kill(launcher, signal.SIGSTOP)
    for pid in (workers := _children(launcher)):
        _signal(pid, signal.SIGABRT)
    deadline = time.monotonic() + _DUMP_S
    while time.monotonic() < deadline and any(map(_is_running, workers)):
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill_tree(launcher: subprocess.Popen) -> None:
    """End the launcher and its workers, which torchrun puts in process groups of their own."""
    if launcher.poll() is None:
        for pid in [*_children(launcher.pid), launcher.pid]:
            _signal(pid, signal.SIGKILL)
    launcher.wait()


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
