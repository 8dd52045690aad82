"""The one error type of this package."""


class ForkError(Exception):
    """A problem the user can act on: says what was expected, what came, and what to change."""
