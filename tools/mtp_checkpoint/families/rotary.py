"""The rotary embedding that a text configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.mtp_checkpoint.families.numbers import is_number

PLAIN = ("default", "mrope")  # the same for text: all three positions of a token are equal


def rotary_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where newer and older configurations have them; empty if nowhere."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return found if isinstance(found, Mapping) else {}


def rotary_kind(config: Mapping[str, Any]) -> str:
    """Its name in transformers; "default" if none is given."""
    found = rotary_parameters(config)
    return found.get("rope_type", found.get("type", "default"))


def rotary_problems(config: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """Why a layer that can compute these kinds cannot compute this one."""
    problems = []
    if (kind := rotary_kind(config)) not in kinds:
        problems.append(f"rope_type is {kind!r}, expected {' or '.join(map(repr, kinds))}")
    if rotary_parameters(config).get("rope_theta", config.get("rope_theta")) is None:
        problems.append("config.json has no rope_theta, which the rotary embedding depends on")
    if "rope_theta" in (found := rotary_parameters(config)):
        theta = found["rope_theta"]
        if not is_number(theta) or theta <= 0:
            problems.append(f"rope_theta is {theta!r}, expected a number above 0")
    return problems
