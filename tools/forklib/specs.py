"""What the pin files say: the base, a patch of the series, what makes a port differ."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Base:
    """The release the series patches."""

    version: str
    sdist: str
    sha256: str
    upstream_tag: str


@dataclass(frozen=True)
class PatchSpec:
    """One `[[patch]]` table: position in the series (from 1), slug, globs of the files it adds."""

    number: int
    slug: str
    adds: tuple[str, ...] = ()
    _patterns: tuple[re.Pattern, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        patterns = tuple(glob_pattern(glob) for glob in self.adds)
        object.__setattr__(self, "_patterns", patterns)

    @property
    def filename(self) -> str:
        """Name of its file in patches/."""
        return f"{self.number:04d}-{self.slug}.patch"

    def owns(self, path: str) -> bool:
        """Whether one of its globs matches the path."""
        return any(pattern.fullmatch(path) for pattern in self._patterns)


@dataclass(frozen=True)
class Port:
    """What ports/<version>/port.toml says beyond the base: how a port differs from the series.

    Args:
        ported: slug to digest of the hook in patches/ that the port's patch was made from.
        left_out: slug of a patch of the series to the reason why the port lacks it.
        files_left_out: globs of added files that the port lacks.
        own: slug of a patch that only the port has to the slug of the series it stands before.
    """

    ported: dict[str, str]
    left_out: dict[str, str]
    files_left_out: tuple[re.Pattern, ...]
    own: dict[str, str]

    def order(self, slugs: Iterable[str]) -> list[str]:
        """Patches of the series, each preceded by the port's own ones that belong before it."""
        slugs = list(slugs)
        ordered = [own for own, before in self.own.items() if before not in slugs]
        for slug in slugs:
            ordered += [own for own, before in self.own.items() if before == slug]
            ordered.append(slug)
        return ordered


def glob_pattern(glob: str) -> re.Pattern:
    """`**` spans folders, `*` and `?` stay inside one."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return re.compile("".join(parts.get(token) or re.escape(token) for token in tokens))
