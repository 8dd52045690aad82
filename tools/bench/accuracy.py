"""How far gradients of the objective are from the plain path's, and from float64's."""

from __future__ import annotations

from typing import Iterator

import torch

from tools.bench.heads import Inputs, Objective, build_head
from tools.bench.results import Goal, Row
from tools.bench.trees import Pair

ACCURACY = "gradients"
_SHAPE = dict(length=256, depths=2, width=64, vocabulary=500, fraction=0.3)
_CHUNK = 32
_EXACT = 1e-12
_NOT_WORSE = Goal(1.05)  # two roundings of the same size do not come out equal
_BF16 = torch.bfloat16


def measure(pair: Pair) -> Iterator[Row]:
    """Rows of the largest relative error of each gradient; a float64 run is the reference."""
    from tests.support import relative_error

    reference, plain = _gradients(pair, torch.float64, 0)
    _, chunked = _gradients(pair, torch.float64, _CHUNK)
    upstream_half, half = _gradients(pair, _BF16, _CHUNK)
    for name, exact in reference.items():
        errors = (
            ("float64, plain path against upstream", None, plain, Goal(_EXACT, "ours")),
            ("float64, chunked against plain path", None, chunked, Goal(_EXACT, "ours")),
            ("bfloat16, chunked against float64", upstream_half, half, _NOT_WORSE),
        )
        for what, theirs, ours, goal in errors:
            want = plain[name] if ours is chunked else exact
            theirs = None if theirs is None else relative_error(theirs[name].double(), want)
            error = relative_error(ours[name].double(), want)
            yield Row(ACCURACY, f"{what}: {name}", "", theirs, error, goal)


def _gradients(pair: Pair, dtype, chunk: int) -> tuple[dict, dict]:
    """Gradients of upstream and ours, from the same values, which bfloat16 holds exactly."""
    from tests.support import fp64_cross_entropy

    inputs = Inputs.random(**_SHAPE, dtype=_BF16)
    inputs.hidden = inputs.hidden.detach().to(dtype).requires_grad_()
    found = []
    for tree in pair:
        model = build_head(tree, pair, _SHAPE["vocabulary"], _SHAPE["width"], _BF16).to(dtype)
        objective = Objective(tree, model, _SHAPE["depths"], chunk=chunk)
        with tree.active(), fp64_cross_entropy():
            found.append(objective.gradients(inputs))
    return found[0], found[1]
