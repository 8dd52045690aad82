"""What a test says about a combination of features, for ``docs/support-matrix.md``.

    @supports("pipeline", agrees=1e-12, ranks=2)
    @pytest.mark.parametrize("case", CASES, ids=...)
    def test_...

Every parameter set of the test is one row of the matrix; its id says which combination it is.
"""

from __future__ import annotations

import dataclasses
from typing import Callable


@dataclasses.dataclass(frozen=True)
class Claim:
    """What every parameter set of one test shows.

    Attributes:
        axis: Section of the matrix.
        result: In words.
        where: What it runs on, in words.
    """

    axis: str
    result: str
    where: str


def supports(
    axis: str,
    *,
    agrees: float | None = None,
    equal: str | None = None,
    refused: str | None = None,
    ranks: int | str = 1,
    dtype: str = "float64",
) -> Callable[[Callable], Callable]:
    """Decorate a test with its `Claim`.

    Args:
        axis: Section of the matrix.
        agrees: Bound of the worst relative gradient difference from one rank that holds everything.
        equal: What the gradients equal bit for bit, instead.
        refused: Start of the message with which the combination is refused, instead.
        ranks: Ranks the test runs on, in words or a number.
        dtype: Of parameters and activations.

    Raises:
        ValueError: Not exactly one of ``agrees``, ``equal`` and ``refused`` is given.
    """
    if sum(value is not None for value in (agrees, equal, refused)) != 1:
        raise ValueError("supports: give exactly one of agrees, equal and refused")
    if agrees is not None:
        result = f"agrees with one rank, ≤ {agrees:g}"
    elif equal is not None:
        result = f"bit-equal to {equal}"
    else:
        result = f"refused: “{refused}”"
    one = "1 rank" if str(ranks) == "1" else f"{ranks} ranks, gloo"
    claim = Claim(axis, result, f"CPU, {one}, {dtype}")

    def mark(test: Callable) -> Callable:
        test.supports = claim
        return test

    return mark
