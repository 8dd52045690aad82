"""What is wrong with an input, said once for the person who has to change it."""

from __future__ import annotations


class CheckpointError(Exception):
    """The input cannot be used. The command line prints it and exits with status 2.

    Attributes:
        problems: One sentence for each thing that is wrong; at least one.
    """

    def __init__(self, *problems: str):
        if not problems:
            raise ValueError("CheckpointError: expected at least one problem, got none")
        self.problems = problems
        super().__init__(*problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems:\n" + "\n".join(f"  - {p}" for p in self.problems)
