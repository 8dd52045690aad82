"""fork.toml and the added files: what the fork is made of."""

import contextlib
import fcntl
import fnmatch
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forklib.errors import ForkError
from forklib.specs import Base, PatchSpec, Port, glob_pattern

ADDED_ROOTS = ("megatron", "tests/support", "tests/unit_tests", "tests/functional_tests")
# Left behind by editors, interpreters and merges; never part of the series.
_JUNK = ("__pycache__", ".*", "*.pyc", "*.so", "*~", "*.orig", "*.rej")


@dataclass(frozen=True)
class Project:
    """The repository of the fork, seen as its series or as one of its ports.

    Args:
        root: the folder that holds fork.toml.
        port: None for the series itself.
    """

    root: Path
    base: Base
    series_number: int
    pinned_tree: str
    patches: tuple[PatchSpec, ...]
    port: Port | None = None

    @property
    def version(self) -> str:
        """Version of the patched distribution."""
        return f"{self.base.version}+mtp.{self.series_number}"

    @property
    def build(self) -> Path:
        """Folder for everything that can be made again."""
        return self.root / "build"

    @property
    def pin(self) -> Path:
        """The file that pins base and tree."""
        return port_file(self.root, self.base.version) if self.port else self.root / "fork.toml"

    @property
    def tree(self) -> Path:
        """The patched tree, a git repository."""
        return self.build / (f"ports/{self.base.version}/tree" if self.port else "tree")

    @property
    def patches_dir(self) -> Path:
        """Folder of the exported series."""
        return self.pin.parent / "patches"

    @property
    def patches_name(self) -> str:
        """The same folder as messages name it."""
        return self.patches_dir.relative_to(self.root).as_posix()

    @property
    def pin_name(self) -> str:
        """The pin file as messages name it."""
        return self.pin.relative_to(self.root).as_posix()

    def make(self, target: str) -> str:
        """The make command that a message advises."""
        return f"make {target} PORT={self.base.version}" if self.port else f"make {target}"

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
        return {name: path for name, path in found.items() if self._has(name)}

    def _has(self, path: str) -> bool:
        """Whether an added file is part of this port; the series itself has all of them."""
        if not self.port:
            return True
        left_out = any(pattern.fullmatch(path) for pattern in self.port.files_left_out)
        return not left_out and bool(self.owners(path))

    def owners(self, path: str) -> list[PatchSpec]:
        """The patches whose globs match an added file; exactly one is right."""
        found = [patch for patch in self.patches if patch.owns(path)]
        # What a port's own patch adds is not for the patch that adds it in the series.
        own = [patch for patch in found if self.port and patch.slug in self.port.own]
        return own or found

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


def load(root: Path, port: str | None = None) -> Project:
    """Reads fork.toml and, for a port, its port.toml.

    Args:
        root: the folder that holds fork.toml.
        port: release of a port; None: the series itself.

    Raises:
        ForkError: a file is missing, is not TOML, or lacks a key.
    """
    fork = _read(root / "fork.toml", lambda data: _fork(root.resolve(), data))
    if port is None:
        return fork
    return _read(port_file(fork.root, port), lambda data: _port(fork, data))


def port_file(root: Path, version: str) -> Path:
    """Where a port is pinned."""
    return root / "ports" / version / "port.toml"


def port_versions(root: Path) -> list[str]:
    """The releases that have a port, newest first."""
    found = [path.parent.name for path in (root / "ports").glob("*/port.toml")]
    return sorted(found, key=lambda name: [int(n) for n in re.findall(r"\d+", name)], reverse=True)


def _fork(root: Path, data: dict) -> Project:
    """The series itself, from fork.toml."""
    specs = tuple(
        PatchSpec(number, table["slug"], tuple(table.get("adds", ())))
        for number, table in enumerate(data.get("patch", ()), start=1)
    )
    series = data["series"]
    return Project(root, _base(data), series["number"], series.get("tree", ""), specs)


def _port(fork: Project, data: dict) -> Project:
    """A port: patches of its own, then those of the series that were ported, numbered anew."""
    tables = data.get("left-out", ())
    globs = [glob for table in tables for glob in table.get("files", ())]
    port = Port(
        dict(data.get("ported", {})),
        {table["patch"]: table["reason"] for table in tables if "patch" in table},
        tuple(glob_pattern(glob) for glob in globs),
        {table["slug"]: table["before"] for table in data.get("patch", ())},
    )
    adds = {spec.slug: spec.adds for spec in fork.patches}
    adds |= {table["slug"]: tuple(table.get("adds", ())) for table in data.get("patch", ())}
    slugs = port.order(spec.slug for spec in fork.patches if spec.slug in port.ported)
    specs = tuple(PatchSpec(n, slug, adds[slug]) for n, slug in enumerate(slugs, start=1))
    pinned = data["series"].get("tree", "")
    return Project(fork.root, _base(data), fork.series_number, pinned, specs, port)


def _base(data: dict) -> Base:
    return Base(**{key: data["base"][key] for key in Base.__dataclass_fields__})


def _read(path: Path, build: Callable[[dict], Project]) -> Project:
    """Builds a project from a TOML file; what is wrong with the file becomes a ForkError."""
    try:
        project = build(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ForkError(f"expected {path}, which does not exist.") from error
    except tomllib.TOMLDecodeError as error:
        raise ForkError(f"{path} is not valid TOML: {error}.") from error
    except KeyError as error:
        raise ForkError(f"{path} lacks the key {error}.") from error
    slugs = [patch.slug for patch in project.patches]
    for slug in slugs:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug):
            raise ForkError(f"{path}: expected a slug of a-z, 0-9 and dashes, but got {slug!r}.")
        if slugs.count(slug) > 1:
            raise ForkError(f"{path}: expected distinct slugs, but {slug!r} stands there twice.")
    return project


def write_value(path: Path, key: str, value: str) -> None:
    """Replaces the string value of a key that occurs once in a TOML file, keeping all else."""
    text = path.read_text(encoding="utf-8")
    new, count = re.subn(rf'(?m)^({re.escape(key)}\s*=\s*)"[^"]*"', rf'\g<1>"{value}"', text)
    if count != 1:
        raise ForkError(f'{path}: expected exactly one line `{key} = "..."`, but found {count}.')
    if new != text:
        path.write_text(new, encoding="utf-8")
