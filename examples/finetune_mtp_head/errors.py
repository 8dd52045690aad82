"""What stops a run because of what the user gave."""


class FinetuneError(Exception):
    """Bad input; the text says what was expected, what came and what to change."""
