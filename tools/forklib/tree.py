"""build/tree: the pinned release, the series as commits, and the added files as they are here."""

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from forklib import native, sdist, series
from forklib.errors import ForkError
from forklib.git import IDENTITY, Repo, blob_id
from forklib.project import Project


@dataclass
class State:
    """What the tooling remembers about build/tree, kept inside its .git.

    Args:
        base_sha256: hash of the sdist it was made from.
        exported_head: the commit that equals patches/ (the last applied or exported one).
        patches_digest: digest of patches/ at that moment.
        synced: added files as last copied here: path to blob id.
    """

    base_sha256: str = ""
    exported_head: str = ""
    patches_digest: str = ""
    synced: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def file(tree: Path) -> Path:
        """Where it is kept."""
        return tree / ".git" / "fork.json"

    @classmethod
    def read(cls, tree: Path) -> "State":
        """Reads the state of an existing tree."""
        try:
            return cls(**json.loads(cls.file(tree).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ForkError(
                f"{tree} was not made by this tooling ({error}). Move it away and run again."
            ) from error

    def write(self, tree: Path) -> None:
        """Stores the state."""
        partial = self.file(tree).with_suffix(".partial")
        partial.write_text(json.dumps(self.__dict__, indent=1, sort_keys=True))
        partial.replace(self.file(tree))


@dataclass(frozen=True)
class Standing:
    """What lies in build/tree apart from the added files.

    Args:
        head: its commit.
        edited: upstream files with uncommitted edits.
        strays: files that are neither upstream's nor among the added files here: path to whether a
            commit of build/tree has them.
    """

    head: str
    edited: list[str]
    strays: dict[str, bool]


def digest(project: Project) -> str:
    """Digest of the exported series."""
    total = hashlib.sha256()
    for path in project.patch_files():
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def open_tree(project: Project) -> tuple[Repo, State]:
    """Opens build/tree for work on the series.

    Raises:
        ForkError: it does not exist, is in the middle of a git operation, or on another branch.
    """
    if not project.tree.exists():
        raise ForkError(f"{project.tree} does not exist. Make it first: {project.make('tree')}")
    state = State.read(project.tree)
    repo = Repo(project.tree)
    busy = repo.busy()
    if busy:
        raise ForkError(f"{project.tree} is in the middle of a git {busy}. Finish or abort it.")
    branch = repo.run("symbolic-ref", "--quiet", "--short", "HEAD").stdout.strip()
    if branch != series.BRANCH:
        raise ForkError(
            f"{project.tree} must be on branch {series.BRANCH}, but is on {branch or 'no branch'}."
            f" Run: git -C {project.tree} switch {series.BRANCH}"
        )
    return repo, state


def standing(project: Project, repo: Repo) -> Standing:
    """Compares build/tree with its base and with the added files here."""
    base = repo.files_of(series.BASE_REF)
    head = repo.files_of("HEAD")
    added = project.added_files()
    entries = repo("status", "--porcelain", "-z", "--untracked-files=all", "--no-renames")
    edited, strays = [], {path: True for path in head if path not in base and path not in added}
    for entry in entries.split("\0"):
        path = entry[3:]
        if path in base:
            edited.append(path)
        elif path and path not in added:
            strays.setdefault(path, path in head)
    return Standing(repo.line("rev-parse", "HEAD"), edited, strays)


def make(project: Project) -> None:
    """Builds build/tree, or brings an existing one up to date without losing work done in it.

    Raises:
        ForkError: the sdist cannot be had or is another one; the series does not apply; build/tree
            holds unexported commits or edits that an update would throw away.
    """
    if project.tree.exists() and not State.file(project.tree).exists():
        raise ForkError(f"{project.tree} was not made by this tooling. Move it away and run again.")
    if not project.tree.exists():
        _build(project)
    else:
        _refresh(project)
    sync(project)
    problem = native.compile_helpers(project.tree)
    if problem:
        print(f"warning: megatron.core.datasets.helpers_cpp was not compiled: {problem}")
    for line in project.ownership_problems():
        print(f"warning: {line}")


def _build(project: Project) -> None:
    archive = sdist.obtain(project)
    fresh = project.build / ".tree-unfinished"
    shutil.rmtree(fresh, ignore_errors=True)
    print(f"building {project.tree} from {project.base.sdist}", flush=True)
    base = series.make_base(fresh, archive, project.base.version)
    repo = Repo(fresh)
    head = series.apply(repo, base, project.patch_files())
    repo("reset", "--quiet", "--hard", head)
    if not Repo(fresh, isolated=False).run("config", "user.email").stdout.strip():
        # Without this nobody who has not set up git could commit a hook here.
        repo("config", "user.name", IDENTITY["GIT_AUTHOR_NAME"])
        repo("config", "user.email", IDENTITY["GIT_AUTHOR_EMAIL"])
    State(project.base.sha256, head, digest(project)).write(fresh)
    project.tree.parent.mkdir(parents=True, exist_ok=True)
    fresh.rename(project.tree)
    print(f"applied {len(project.patch_files())} patches on megatron-core {project.base.version}")


def _refresh(project: Project) -> None:
    """Applies the series anew if patches/ or the base changed since the last time."""
    state = State.read(project.tree)
    now = digest(project)
    if state.base_sha256 == project.base.sha256 and state.patches_digest == now:
        return
    repo, state = open_tree(project)
    found = standing(project, repo)
    if found.head != state.exported_head or found.edited:
        what = "commits that were not exported" if not found.edited else "uncommitted edits"
        raise ForkError(
            f"{project.patches_name}/ or the base changed, but {project.tree} holds {what};"
            f" making it anew would throw them away. Keep them (commit, then git -C {project.tree} format-patch"
            f" {state.exported_head[:12]}), or drop them:"
            f" git -C {project.tree} reset --hard {state.exported_head[:12]}"
        )
    if state.base_sha256 != project.base.sha256:
        kept = project.build / f"tree-{state.base_sha256[:12]}"
        if kept.exists():
            raise ForkError(f"the base changed; remove or rename {kept} first.")
        project.tree.rename(kept)
        print(f"the base changed: the former tree is kept as {kept}")
        _build(project)
        return
    head = series.apply(repo, series.BASE_REF, project.patch_files())
    repo("reset", "--quiet", "--hard", head)
    State(project.base.sha256, head, now, state.synced).write(project.tree)
    print(f"applied {len(project.patch_files())} changed patches")


def sync(project: Project) -> None:
    """Copies the added files into the work tree of build/tree and removes those deleted here.

    Raises:
        ForkError: an added file was edited in build/tree, where edits are lost.
    """
    repo, state = Repo(project.tree), State.read(project.tree)
    head = repo.files_of("HEAD")
    added = project.added_files()
    todo, foreign = {}, []
    for path, source in added.items():
        content = source.read_bytes()
        known = {state.synced.get(path), head.get(path, (None, None))[1]}
        state.synced[path] = blob_id(content)
        there = project.tree / path
        if there.is_file():
            came = blob_id(there.read_bytes())
            if came == state.synced[path]:
                continue
            if came not in known:
                foreign.append(path)
        todo[path] = content
    if foreign:
        lines = "\n".join(f"  {path}" for path in foreign)
        raise ForkError(
            f"these added files were edited in {project.tree}, but their truth is the copy in"
            f" {project.root}:\n{lines}\nCopy the edit there, or delete the file there."
        )
    for path, content in todo.items():
        there = project.tree / path
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(content)
        there.chmod(0o755 if added[path].stat().st_mode & 0o100 else 0o644)
    gone = _remove_deleted(project, repo, state, head)
    if todo or gone:
        print(f"added files: {len(todo)} copied to {project.tree}, {gone} removed")
    state.write(project.tree)


def _remove_deleted(project: Project, repo: Repo, state: State, head: dict) -> int:
    """Deletes from the work tree what was an added file and no longer exists here."""
    base = repo.files_of(series.BASE_REF)
    added = project.added_files()
    exported = repo.files_of(state.exported_head)
    candidates = set(state.synced) | {path for path in head if path in exported}
    gone = [path for path in candidates if path not in base and path not in added]
    for path in gone:
        state.synced.pop(path, None)
        (project.tree / path).unlink(missing_ok=True)
    return len(gone)
