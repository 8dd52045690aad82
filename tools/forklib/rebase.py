"""`rebase`: the series tried on another release, with 3-way merges, in a repository of its own."""

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from forklib import export, sdist, series, tree
from forklib import project as projects
from forklib.errors import ForkError
from forklib.git import FIXED_DATE, IDENTITY, Repo
from forklib.project import Project

_OLD_BASE, _OLD_SERIES = "refs/fork/old-base", "refs/fork/old-series"


@dataclass(frozen=True)
class Trial:
    """What a trial rebase is about, kept inside its .git.

    Args:
        version: the release tried.
        sdist: name of its sdist.
        sha256: hash of its sdist.
    """

    version: str
    sdist: str
    sha256: str


def folder(project: Project, version: str) -> Path:
    """Where a release is tried."""
    return project.build / f"rebase-{version}"


def start(project: Project, version: str, archive: Path | None = None) -> None:
    """Tries the series on a release.

    Args:
        project: the fork.
        version: the release, such as "0.19.1".
        archive: its sdist; None: from build/sdist or the package index.

    Raises:
        ForkError: a trial exists already, or a patch conflicts (the trial then waits).
    """
    path = folder(project, version)
    if path.exists():
        raise ForkError(f"{path} exists. {_next_steps(version)}")
    old = sdist.obtain(project)
    new = archive or project.build / "sdist" / f"megatron_core-{version}.tar.gz"
    if archive is None and not new.is_file():
        new = sdist.download(version, new.parent)
    trial = Trial(version, new.name, sdist.sha256(new))
    print(f"{trial.sdist}: sha256 {trial.sha256}")
    fresh = project.build / ".rebase-unfinished"
    shutil.rmtree(fresh, ignore_errors=True)
    old_base = series.make_base(fresh, old, project.base.version)
    repo = Repo(fresh)
    repo("update-ref", _OLD_BASE, old_base)
    repo("update-ref", _OLD_SERIES, series.apply(repo, old_base, project.patch_files()))
    repo("update-ref", series.BASE_REF, _commit_release(repo, new, version))
    (fresh / ".git" / "fork-rebase.json").write_text(json.dumps(asdict(trial)))
    repo("reset", "--quiet", "--hard", _OLD_SERIES)
    fresh.rename(path)
    repo = Repo(path)
    done = repo.run(
        *("rebase", "--merge", "--empty=drop", "--committer-date-is-author-date"),
        *("--onto", series.BASE_REF, _OLD_BASE),
        env=IDENTITY,
    )
    _finish_or_explain(project, repo, trial, done)


def resume(project: Project, version: str) -> None:
    """Goes on after conflicts were resolved and added in the trial's folder."""
    repo, trial = _open(project, version)
    if repo.busy():
        done = repo.run("rebase", "--continue", env=IDENTITY)
        _finish_or_explain(project, repo, trial, done)
    else:
        _report(project, repo, trial)


def abort(project: Project, version: str) -> None:
    """Deletes the trial."""
    repo, _ = _open(project, version)
    shutil.rmtree(repo.path)
    print(f"{repo.path} is gone; nothing else was changed")


def adopt(project: Project, version: str) -> None:
    """Makes a finished trial the new base: fork.toml, build/tree and patches/.

    Raises:
        ForkError: the trial is not finished, build/tree holds work that was not exported, or a
            dropped patch still owns added files.
    """
    repo, trial = _open(project, version)
    if repo.busy():
        raise ForkError(f"{repo.path} is not finished. {_next_steps(version)}")
    dropped = _dropped(project, repo)
    for spec in dropped:
        owned = [path for path in project.added_files() if spec.owns(path)]
        if owned:
            raise ForkError(
                f"patch {spec.slug} became empty on {version}, but owns {owned[0]}. Delete that"
                " file or give it to another patch in fork.toml, make patches, and rebase again."
            )
    kept = project.build / f"tree-{project.base.sha256[:12]}"
    if project.tree.exists():
        current, state = tree.open_tree(project)
        found = tree.standing(project, current)
        if found.edited or found.head != state.exported_head:
            raise ForkError(f"{project.tree} holds work that was not exported. Run: make patches")
        if kept.exists():
            raise ForkError(f"{kept} is in the way. Remove or rename it.")
        project.tree.rename(kept)
    for spec in dropped:
        _drop_table(project, spec.slug)
    for key, value in (("version", version), ("sdist", trial.sdist), ("sha256", trial.sha256)):
        projects.write_value(project.pin, key, value)
    projects.write_value(project.pin, "upstream_tag", f"core_v{version}")
    repo.path.rename(project.tree)
    head = Repo(project.tree).line("rev-parse", "HEAD")
    tree.State(trial.sha256, head, tree.digest(project)).write(project.tree)
    export.write(projects.load(project.root))
    print(f"the base is now megatron-core {version}; run make check and make test")


def _commit_release(repo: Repo, archive: Path, version: str) -> str:
    """Commits another sdist in the same repository, without touching its work tree."""
    with tempfile.TemporaryDirectory(prefix="fork-release-") as scratch:
        top = Path(scratch) / "release"
        sdist.unpack(archive, top)
        git_dir = str(repo.path / ".git")
        env = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        where = ("--git-dir", git_dir, "--work-tree", str(top))
        repo(*where, "add", "--all", "--force", str(top), env=env)
        tree_id = repo("write-tree", env=env).strip()
    message = f"megatron-core {version}, the sdist as published"
    return repo("commit-tree", tree_id, "-m", message, env=IDENTITY | FIXED_DATE).strip()


def _open(project: Project, version: str) -> tuple[Repo, Trial]:
    path = folder(project, version)
    record = path / ".git" / "fork-rebase.json"
    if not record.is_file():
        raise ForkError(f"no trial in {path}. Start one: make rebase BASE={version}")
    return Repo(path), Trial(**json.loads(record.read_text()))


def _finish_or_explain(project: Project, repo: Repo, trial: Trial, done) -> None:
    """Reports a finished rebase, or says what conflicts and how to go on."""
    if done.returncode == 0 and not repo.busy():
        _report(project, repo, trial)
        return
    conflicts = repo("diff", "--name-only", "--diff-filter=U").split()
    if not conflicts:
        raise ForkError(
            f"the rebase stopped in {repo.path}:\n{(done.stdout + done.stderr).strip()}"
        )
    subject = repo.line("log", "-1", "--format=%s", "REBASE_HEAD")
    files = "\n".join(f"  {path}" for path in conflicts)
    raise ForkError(
        f"{subject!r} conflicts with megatron-core {trial.version} in:\n{files}\n"
        f"Resolve them in {repo.path} and `git add` them there. {_next_steps(trial.version)}"
    )


def _next_steps(version: str) -> str:
    verb = f"python tools/fork.py rebase {version}"
    return f"Then go on: {verb} --continue. To give up and delete the trial: {verb} --abort"


def _report(project: Project, repo: Repo, trial: Trial) -> None:
    old, new = f"{_OLD_BASE}..{_OLD_SERIES}", f"{series.BASE_REF}..{series.BRANCH}"
    print(repo("range-diff", "--no-color", old, new), end="")
    for spec in _dropped(project, repo):
        print(f"dropped, empty on {trial.version}: {spec.filename}")
    count = len(repo.commits(series.BASE_REF, series.BRANCH))
    print(f"{count} patches apply to megatron-core {trial.version} in {repo.path}")
    print(f"patched tree: {repo.tree_of(series.BRANCH)}")
    print(f"make it the base: python tools/fork.py rebase {trial.version} --adopt")


def _dropped(project: Project, repo: Repo) -> list[projects.PatchSpec]:
    """The patches of the old series whose subject the new one lacks."""
    olds = repo.commits(_OLD_BASE, _OLD_SERIES)
    news = repo.commits(series.BASE_REF, series.BRANCH)
    kept = {series.describe(repo, commit).subject for commit in news}
    pairs = zip(project.patches, olds, strict=False)
    return [spec for spec, old in pairs if series.describe(repo, old).subject not in kept]


def _drop_table(project: Project, slug: str) -> None:
    """Takes a `[[patch]]` table out of fork.toml, leaving the rest of the text."""
    path = project.root / "fork.toml"
    head, *tables = path.read_text(encoding="utf-8").split("[[patch]]")
    kept = [table for table in tables if f'slug = "{slug}"' not in table]
    path.write_text("[[patch]]".join([head, *kept]).rstrip("\n") + "\n", encoding="utf-8")
