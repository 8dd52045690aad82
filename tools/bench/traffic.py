"""Calls, bytes and host synchronisations of a training forward and backward with heads.

Counted on real ranks over packed sequences; the attention's own messages are left out, the decoder
has no others.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

from tools.bench.counting import CountTraffic, FindSyncs
from tools.bench.heads import build, chunked
from tools.bench.results import Goal, Row
from tools.bench.sizes import Sizes
from tools.bench.trees import Pair, load_pair

CALLS, SYNCS = "messages per microbatch at CP=2, per rank", "host synchronisations"
_LENGTH = 16  # tokens of each packed sequence
_WIDTH, _VOCABULARY, _CHUNK = 16, 64, 8


def measure(upstream: Path, sizes: Sizes, tick: Callable[[str], None]) -> Iterator[Row]:
    """Rows of every number of sequences and depths.

    Args:
        upstream: see `load_pair`.
    """
    from tests.support import run_ranks

    cases = [(n, depths) for depths in sizes.message_depths for n in sizes.sequences]
    first = None
    for cp in (2, 1):
        tick(f"messages CP={cp}")
        counts = run_ranks(_count, cp, str(upstream), cp, cases, timeout=300)[0]
        for case, (theirs, ours) in zip(cases, counts):
            first = first or ours
            yield from _rows(cp, *case, theirs, ours, constant=first["calls"])


def _rows(cp: int, n: int, depths: int, theirs, ours, constant: int) -> Iterator[Row]:
    name = f"{n} sequence{'s' * (n > 1)}, D={depths}"
    key = dict(sequences=n, D=depths, CP=cp)
    if cp > 1:
        for what, unit in (("calls", ""), ("collectives", ""), ("bytes", "B")):
            goal = Goal(constant, "ours") if what == "calls" else None
            row_key = key | dict(what=what)
            yield Row(CALLS, f"{what}, {name}", unit, theirs[what], ours[what], goal, row_key)
    syncs = theirs["syncs"], ours["syncs"]
    places = dict(places=ours["places"])
    yield Row(SYNCS, f"CP={cp}, {name}", "", *syncs, Goal(0, "ours"), key | places)


def _count(upstream: str, cp: int, cases: list[tuple[int, int]]) -> list[list[dict[str, Any]]]:
    """On one rank: per case, what upstream and ours do."""
    pair = load_pair(Path(upstream))
    with pair.world(cp=cp):
        return [[_count_one(pair, tree, cp, *case) for tree in pair] for case in cases]


def _count_one(pair: Pair, tree, cp: int, sequences: int, depths: int) -> dict[str, Any]:
    from tests.support import cp_shard, thd_batch

    groups = pair.groups[tree.name]
    overrides = chunked(tree, _CHUNK)
    model = build(tree, pair, _VOCABULARY, _WIDTH, torch.float32, depths, overrides=overrides)
    whole = thd_batch((_LENGTH,) * sequences, None, "prompt")
    batch = cp_shard(whole, cp, groups.cp.rank())
    run = functools.partial(_forward_and_backward, tree, model, batch)
    run()  # what happens once per process is not what a microbatch costs
    with CountTraffic() as counted, FindSyncs() as found:
        run()
    traffic = counted.traffic
    return dict(
        calls=traffic.total,
        collectives=traffic.collectives,
        bytes=traffic.bytes,
        syncs=found.total,
        operators=dict(traffic.calls),
        places=dict(found.places),
    )


def _forward_and_backward(tree, model, batch) -> None:
    with tree.active():
        model(**batch.forward_kwargs()).sum().backward()
