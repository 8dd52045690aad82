"""The error that every verb reports."""


class CheckpointError(Exception):
    """Input that cannot be used; the message says what was expected, what came, what to change."""
