"""What `check` found."""

from dataclasses import dataclass, field


@dataclass
class Report:
    """What the checks found.

    Args:
        failures: each makes the run fail.
        warnings: worth a look, no failure.
    """

    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def step(self, name: str, found: list[str]) -> None:
        """Records one check and shows how it went."""
        print(f"{'FAIL' if found else ' ok '} {name}", flush=True)
        for line in found:
            print(f"     {line}")
        self.failures += found
