"""Replacing an attribute while keeping its name, signature and docstring."""

from __future__ import annotations

import functools
from typing import Any, Callable


def replace(owner: Any, name: str, make: Callable[..., Any]) -> None:
    """Set ``owner.name`` to a function that calls ``make(original, *args, **kwargs)``.

    Args:
        owner: Module or class that holds the attribute.
        name: The attribute; it must exist, so that a renamed upstream function is noticed.
        make: The new behaviour; gets the original function as its first argument.

    Raises:
        AttributeError: ``owner`` has no such attribute.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return make(original, *args, **kwargs)

    setattr(owner, name, replacement)
