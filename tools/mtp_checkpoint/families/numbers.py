"""What counts as a number in a config.json, where JSON lets everything stand, NaN included."""

from __future__ import annotations

import sys


def is_number(value: object) -> bool:
    """A finite number that a float can hold; true and false are none."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and abs(value) <= sys.float_info.max


def is_count(value: object) -> bool:
    """A whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
