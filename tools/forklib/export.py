"""`patches`: the series written anew from the commits of build/tree and the added files here."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from forklib import project as projects
from forklib import sdist, series, tree
from forklib.errors import ForkError
from forklib.git import IDENTITY, Repo
from forklib.project import Project

_FIXUPS = ("fixup!", "squash!", "amend!")


@dataclass(frozen=True)
class Exported:
    """A series ready to be written.

    Args:
        head: its last commit.
        commits: by file name in patches/, oldest first; empty ones at the end have no file yet.
        patches: file name in patches/ to content.
    """

    head: str
    commits: dict[str, str]
    patches: dict[str, str]


def write(project: Project, into: str | None = None) -> None:
    """Rewrites patches/, moves build/tree to the rewritten commits and pins the new tree id.

    Args:
        project: the fork.
        into: slug of the patch that takes the uncommitted hook edits of build/tree.

    Raises:
        ForkError: build/tree holds uncommitted hook edits and `into` is not given; the commits and
            the `[[patch]]` tables do not pair up; an added file belongs to no patch or to several.
    """
    repo, state = tree.open_tree(project)
    problems = project.ownership_problems()
    if problems:
        raise ForkError("\n".join(problems))
    if into:
        _commit_fixup(project, repo, into)
    _require_clean(project, repo, state)
    head = _autosquash(repo)
    exported = rebuild(project, repo, head)
    repo("update-ref", f"refs/heads/{series.BRANCH}", exported.head)
    repo("reset", "--quiet", "--mixed", exported.head)
    changed = _write_files(project, exported)
    projects.write_value(project.pin, "tree", repo.tree_of(exported.head))
    state.exported_head, state.patches_digest = exported.head, tree.digest(project)
    state.write(project.tree)
    tree.sync(project)
    for patch in project.patches:
        name = patch.filename
        mark = "*" if name in changed else " " if name in exported.patches else "-"
        commit = exported.commits.get(name)
        subject = series.describe(repo, commit).subject if commit else "no commit in the tree yet"
        note = " (empty yet: not written)" if commit and mark == "-" else ""
        print(f" {mark} {name:<36} {subject}{note}")
    print(f"{len(changed)} of {len(exported.patches)} patches changed")


def refresh(project: Project) -> None:
    """Rewrites patches/ with the added files as they are here, from patches/ alone.

    What a port needs after the series has changed an added file; its tree may not even exist.
    """
    archive = sdist.obtain(project)
    with tempfile.TemporaryDirectory(prefix="fork-refresh-") as scratch:
        repo = Repo(Path(scratch) / "tree")
        base = series.make_base(repo.path, archive, project.base.version)
        exported = rebuild(project, repo, series.apply(repo, base, project.patch_files()))
        changed = _write_files(project, exported)
        projects.write_value(project.pin, "tree", repo.tree_of(exported.head))
    print(f"{project.patches_name}: {len(changed)} of {len(exported.patches)} patches changed")


def rebuild(project: Project, repo: Repo, head: str) -> Exported:
    """Rebuilds each commit with its added files replaced by the copies in this repository.

    Commit N keeps its message, author and dates. Its tree is upstream's files as in that commit,
    plus the copies here of every added file that patches 1..N own. Only git objects are written.

    Args:
        project: the fork.
        repo: a repository with the series as commits after BASE_REF.
        head: the last of them.
    """
    commits = repo.commits(series.BASE_REF, head)
    if len(commits) > len(project.patches):
        extra = series.describe(repo, commits[len(project.patches)]).subject
        raise ForkError(
            f"{repo.path} has {len(commits)} commits after the base, but {project.pin_name} has"
            f" {len(project.patches)} [[patch]] tables. Add a table for {extra!r}, or fold it into"
            " an earlier commit."
        )
    base = repo.files_of(series.BASE_REF)
    blobs = _store_added(project, repo)
    clash = sorted(set(blobs) & set(base))
    if clash:
        raise ForkError(
            f"{clash[0]} is upstream's own file: hook it in build/tree and delete the copy here."
        )
    parent = repo.line("rev-parse", series.BASE_REF)
    rebuilt: dict[str, str] = {}
    patches: dict[str, str] = {}
    for spec, commit in zip(project.patches, commits, strict=False):
        owned = {path for path in blobs if project.owners(path)[0].number <= spec.number}
        files = {p: entry for p, entry in repo.files_of(commit).items() if p in base}
        files |= {path: blobs[path] for path in owned}
        before, parent = parent, recommit(repo, commit, parent, files)
        rebuilt[spec.filename] = parent
        if repo.tree_of(parent) != repo.tree_of(before):
            patches[spec.filename] = series.export(repo, parent)
    for name in rebuilt:
        if name not in patches and name < max(patches, default=""):
            raise ForkError(
                f"{name} would be empty: its commit hooks nothing, its globs in {project.pin_name}"
                " match no file. git am stops at an empty patch; drop the commit and the table."
            )
    return Exported(parent, rebuilt, patches)


def _store_added(project: Project, repo: Repo) -> dict[str, tuple[str, str]]:
    """Writes the added files as blobs; returns path to (mode, blob id)."""
    added = project.added_files()
    if not added:
        return {}
    paths = "".join(f"{path}\n" for path in added.values())
    ids = repo("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=paths).split()
    modes = ["100755" if p.stat().st_mode & 0o100 else "100644" for p in added.values()]
    return dict(zip(added, zip(modes, ids, strict=True), strict=True))


def recommit(repo: Repo, commit: str, parent: str, files: dict[str, tuple[str, str]]) -> str:
    """Makes a commit with other files and another parent, the same in everything else."""
    listing = "".join(f"{mode} {blob}\t{path}\0" for path, (mode, blob) in files.items())
    with tempfile.TemporaryDirectory() as scratch:
        index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        repo("update-index", "-z", "--index-info", env=index, stdin=listing)
        tree_id = repo("write-tree", env=index).strip()
    names = ("AUTHOR_NAME", "AUTHOR_EMAIL", "AUTHOR_DATE")
    names += ("COMMITTER_NAME", "COMMITTER_EMAIL", "COMMITTER_DATE")
    values = repo.line("log", "-1", "--date=raw", "--format=%an%n%ae%n%ad%n%cn%n%ce%n%cd", commit)
    identity = {f"GIT_{n}": v for n, v in zip(names, values.split("\n"), strict=True)}
    message = repo("log", "-1", "--format=%B", commit).rstrip("\n") + "\n"
    return repo("commit-tree", tree_id, "-p", parent, env=identity, stdin=message).strip()


def _require_clean(project: Project, repo: Repo, state: tree.State) -> None:
    """Refuses what an export would lose or leave out."""
    found = tree.standing(project, repo)
    if found.edited:
        files = "\n".join(f"  {path}" for path in found.edited)
        raise ForkError(
            f"{project.tree} holds uncommitted edits of upstream files:\n{files}\n"
            f"Say which patch takes them:  {project.make('patches')} ARGS=\"--into SLUG\"\n"
            f"or commit them yourself:     git -C {project.tree} commit --fixup COMMIT"
            f"  (folded in by the next `{project.make('patches')}`)"
        )
    exported = repo.files_of(state.exported_head)
    lost = sorted(p for p in found.strays if p not in exported and p not in state.synced)
    if lost:
        files = "\n".join(f"  {path}" for path in lost)
        raise ForkError(
            f"{project.tree} holds files that are neither upstream's nor ours:\n{files}\n"
            f"Move each to the same path in {project.root} (megatron/ or tests/), or delete it."
        )


def _commit_fixup(project: Project, repo: Repo, slug: str) -> None:
    """Commits the edited upstream files as a fixup of a patch's commit."""
    commits = repo.commits(series.BASE_REF, "HEAD")
    commits = [c for c in commits if not _is_fixup(repo, c)]
    numbers = {patch.slug: patch.number for patch in project.patches}
    if numbers.get(slug, len(commits) + 1) > len(commits):
        known = ", ".join(patch.slug for patch in project.patches[: len(commits)]) or "none yet"
        raise ForkError(f"no commit for patch {slug!r} in {project.tree}. It has: {known}.")
    edited = tree.standing(project, repo).edited
    if not edited:
        raise ForkError(f"{project.tree} holds no uncommitted edits to fold into {slug!r}.")
    repo("add", "--all", "--", *edited)
    repo("commit", "--quiet", "--fixup", commits[numbers[slug] - 1], "--", *edited, env=IDENTITY)


def _is_fixup(repo: Repo, commit: str) -> bool:
    return repo.line("log", "-1", "--format=%s", commit).startswith(_FIXUPS)


def _autosquash(repo: Repo) -> str:
    """Folds fixup commits into their targets, in a work tree of its own; returns the new head."""
    head = repo.line("rev-parse", "HEAD")
    if not any(_is_fixup(repo, commit) for commit in repo.commits(series.BASE_REF, head)):
        return head
    with tempfile.TemporaryDirectory(prefix="fork-fold-") as scratch:
        work = Repo(Path(scratch) / "work")
        repo("worktree", "add", "--quiet", "--detach", str(work.path), head)
        try:
            env = IDENTITY | {"GIT_SEQUENCE_EDITOR": "true"}
            options = ("--interactive", "--autosquash", "--keep-empty", "--empty=keep")
            done = work.run("rebase", "--quiet", *options, series.BASE_REF, env=env)
            if done.returncode:
                raise ForkError(
                    "a fixup commit does not fold into its patch without conflict. Do it yourself:"
                    f" git -C {repo.path} rebase -i --autosquash {series.BASE_REF}\n"
                    f"{(done.stdout + done.stderr).strip()}"
                )
            folded = work.line("rev-parse", "HEAD")
        finally:
            repo("worktree", "remove", "--force", str(work.path))
    left = [c for c in repo.commits(series.BASE_REF, folded) if _is_fixup(repo, c)]
    if left:
        subject = series.describe(repo, left[0]).subject
        raise ForkError(f"no patch has the subject that {subject!r} is to be folded into.")
    return folded


def _write_files(project: Project, exported: Exported) -> set[str]:
    """Makes patches/ hold exactly the exported files; returns the names that changed."""
    changed = set()
    for name, text in exported.patches.items():
        if series.write_patch(project.patches_dir / name, text):
            changed.add(name)
    for path in project.patch_files():
        if path.name not in exported.patches:
            path.unlink()
            print(f" - {path.name} removed")
    return changed
