"""fork.toml and the added files: what the fork is made of."""

import contextlib
import fcntl
import fnmatch
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from forklib.errors import ForkError

ADDED_ROOTS = ("megatron", "tests/support", "tests/unit_tests", "tests/functional_tests")
# Left behind by editors, interpreters and merges; never part of the series.
_JUNK = ("__pycache__", ".*", "*.pyc", "*.so", "*~", "*.orig", "*.rej")


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
        patterns = tuple(_glob_pattern(glob) for glob in self.adds)
        object.__setattr__(self, "_patterns", patterns)

    @property
    def filename(self) -> str:
        """Name of its file in patches/."""
        return f"{self.number:04d}-{self.slug}.patch"

    def owns(self, path: str) -> bool:
        """Whether one of its globs matches the path."""
        return any(pattern.fullmatch(path) for pattern in self._patterns)


@dataclass(frozen=True)
class Project:
    """The repository of the fork.

    Args:
        root: the folder that holds fork.toml.
    """

    root: Path
    base: Base
    series_number: int
    pinned_tree: str
    patches: tuple[PatchSpec, ...]

    @property
    def version(self) -> str:
        """Version of the patched distribution."""
        return f"{self.base.version}+mtp.{self.series_number}"

    @property
    def build(self) -> Path:
        """Folder for everything that can be made again."""
        return self.root / "build"

    @property
    def tree(self) -> Path:
        """The patched tree, a git repository."""
        return self.build / "tree"

    @property
    def patches_dir(self) -> Path:
        """Folder of the exported series."""
        return self.root / "patches"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps two runs from changing build/ and patches/ at once; the second one waits."""
        self.build.mkdir(exist_ok=True)
        with (self.build / ".fork.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def patch_files(self) -> list[Path]:
        """The exported series in order."""
        return sorted(self.patches_dir.glob("*.patch"))

    def added_files(self) -> dict[str, Path]:
        """The files the fork adds, by their path in a Megatron checkout."""
        found = {}
        for top in ADDED_ROOTS:
            for path in sorted((self.root / top).rglob("*")):
                relative = path.relative_to(self.root)
                junk = any(fnmatch.fnmatch(p, j) for p in relative.parts for j in _JUNK)
                if junk or path.is_dir() and not path.is_symlink():
                    continue
                if path.is_symlink():
                    raise ForkError(f"expected a plain file, but {relative} is a link. Replace it.")
                found[relative.as_posix()] = path
        return found

    def owners(self, path: str) -> list[PatchSpec]:
        """The patches whose globs match an added file; exactly one is right."""
        return [patch for patch in self.patches if patch.owns(path)]

    def ownership_problems(self) -> list[str]:
        """One line per added file that belongs to no patch or to several."""
        problems = []
        for path in self.added_files():
            owners = self.owners(path)
            if len(owners) != 1:
                who = ", ".join(patch.slug for patch in owners) or "none"
                problems.append(
                    f"{path} must belong to exactly one patch, but matches: {who}."
                    " Edit the `adds` globs in fork.toml."
                )
        return problems


def load(root: Path) -> Project:
    """Reads fork.toml.

    Raises:
        ForkError: the file is missing, is not TOML, or lacks a key.
    """
    path = root / "fork.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        base = Base(**{key: data["base"][key] for key in Base.__dataclass_fields__})
        patches = tuple(
            PatchSpec(number, table["slug"], tuple(table.get("adds", ())))
            for number, table in enumerate(data.get("patch", ()), start=1)
        )
        project = Project(
            root.resolve(), base, data["series"]["number"], data["series"].get("tree", ""), patches
        )
    except FileNotFoundError as error:
        raise ForkError(f"expected {path}, which does not exist.") from error
    except tomllib.TOMLDecodeError as error:
        raise ForkError(f"{path} is not valid TOML: {error}.") from error
    except KeyError as error:
        raise ForkError(f"{path} lacks the key {error}.") from error
    slugs = [patch.slug for patch in patches]
    for slug in slugs:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug):
            raise ForkError(f"{path}: expected a slug of a-z, 0-9 and dashes, but got {slug!r}.")
        if slugs.count(slug) > 1:
            raise ForkError(f"{path}: expected distinct slugs, but {slug!r} stands there twice.")
    return project


def write_value(root: Path, key: str, value: str) -> None:
    """Replaces the string value of a key that occurs once in fork.toml, keeping everything else."""
    path = root / "fork.toml"
    text = path.read_text(encoding="utf-8")
    new, count = re.subn(rf'(?m)^({re.escape(key)}\s*=\s*)"[^"]*"', rf'\g<1>"{value}"', text)
    if count != 1:
        raise ForkError(f'{path}: expected exactly one line `{key} = "..."`, but found {count}.')
    if new != text:
        path.write_text(new, encoding="utf-8")


def _glob_pattern(glob: str) -> re.Pattern:
    """`**` spans folders, `*` and `?` stay inside one."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return re.compile("".join(parts.get(token) or re.escape(token) for token in tokens))
