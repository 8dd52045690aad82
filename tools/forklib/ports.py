"""Ports: the series kept on other releases, as ports/<version>/.

A port differs from the series in its hooks only. `update` replays the series onto the port's
release: a hook that is as it was when it was ported is taken from the port, any other from the
series.
"""

import hashlib
import json
import re
import tempfile
from pathlib import Path

from forklib import export, sdist, series, tree
from forklib import project as projects
from forklib.errors import ForkError
from forklib.git import IDENTITY, Repo
from forklib.project import Project

_TEMPLATE = """\
# A port of the series to another release; docs/patches.md explains. Its patches are those of
# fork.toml, with hooks made for this release; added files are the copies in this repository.

[base]
version = "{version}"
sdist = "{sdist}"
sha256 = "{sha256}"
upstream_tag = "core_v{version}"

[series]
tree = ""                  # id of the patched tree; `make patches` writes it

# [[patch]]     slug = …, before = …, adds = […]     a patch that only this port has
# [[left-out]]  patch = … or files = […], reason = …

# Patches of the series that are here, with the digest of the hook each was made from;
# `make port` writes it.
[ported]
"""
_RECORD = "fork-update.json"
_PICK = ("cherry-pick", "--allow-empty", "--allow-empty-message", "--keep-redundant-commits")


def hook_digest(patch: str) -> str:
    """Digest of the lines that a patch file adds to or takes from upstream's files."""
    digest = hashlib.sha256()
    for section in re.split(r"(?m)^(?=diff --git )", patch)[1:]:
        header, *hunks = re.split(r"(?m)^(?=@@ )", section)
        if "\nnew file mode " not in header:
            lines = [line for line in "".join(hunks).split("\n") if line[:1] in ("+", "-")]
            digest.update("\n".join([header.split("\n")[0], *lines]).encode(errors="replace"))
    return digest.hexdigest()[:12]


def digests(fork: Project) -> dict[str, str]:
    """The digest of every hook of the series, by slug."""
    files = {spec.slug: fork.patches_dir / spec.filename for spec in fork.patches}
    return {
        slug: hook_digest(path.read_text(encoding="utf-8", errors="surrogateescape"))
        for slug, path in files.items()
        if path.is_file()
    }


def problems(fork: Project, port: Project) -> list[str]:
    """One line per patch of the series that the port lacks, or whose hook has changed since."""
    now, found = digests(fork), []
    run = f"Run: {port.make('port')}"
    for slug in sorted(set(port.port.ported) & set(port.port.left_out)):
        found.append(f"{port.pin_name}: {slug} is left out, but stands under [ported]. {run}")
    for slug in now:
        came = port.port.ported.get(slug)
        if came is None and slug not in port.port.left_out:
            found.append(f"{slug} is neither ported nor left out with a reason. {run}")
        elif came not in (None, now[slug]):
            found.append(f"the hook of {slug} in patches/ has changed since it was ported. {run}")
    known = {spec.slug for spec in fork.patches}
    for slug in sorted((set(port.port.ported) | set(port.port.left_out)) - known):
        found.append(f"{port.pin_name} names {slug}, which the series no longer has. {run}")
    return found


def update(
    fork: Project, version: str, archive: Path | None = None, like: str | None = None
) -> None:
    """Replays the series onto a release, making the port if there is none yet.

    Args:
        fork: the series.
        version: the release, such as "0.18.2".
        archive: its sdist, for a new port; None: from build/sdist or the package index.
        like: release of another port, nearer to this one: hooks come from there, not from the
            series, where it has them.

    Raises:
        ForkError: the port's tree holds work that was not exported; a hook conflicts (the tree then
            waits for a resolution).
    """
    if version == fork.base.version:
        raise ForkError(f"{version} is what the series itself patches.")
    if not projects.port_file(fork.root, version).is_file():
        _create(fork, version, archive)
    port = projects.load(fork.root, version)
    tree.make(port)
    repo, state = tree.open_tree(port)
    found = tree.standing(port, repo)
    if found.edited or found.head != state.exported_head:
        raise ForkError(f"{port.tree} holds work not exported. Run: {port.make('patches')}")
    now = digests(fork)
    wanted = {slug: now[slug] for slug in now if slug not in port.port.left_out}
    theirs = _hooks_from(fork, repo)
    if like:
        nearer = projects.load(fork.root, like)
        if problems(fork, nearer):
            raise ForkError(f"ports/{like} lags behind the series. Run: {nearer.make('port')}")
        theirs |= _hooks_from(nearer, repo)
    ours = _hook_commits(port, repo, series.BASE_REF, series.BRANCH)
    picks = []
    for slug in port.port.order(wanted):
        same = slug in ours and port.port.ported.get(slug) == wanted.get(slug)
        print(f" {' ' if same else '*'} {slug}: {'as ported' if same else 'replayed'}")
        picks.append(ours[slug] if same else theirs[slug])
    record = {"head": found.head, "ported": wanted}
    (port.tree / ".git" / _RECORD).write_text(json.dumps(record))
    repo("reset", "--quiet", "--hard", series.BASE_REF)
    _finish_or_explain(fork, port, repo, repo.run(*_PICK, *picks, env=IDENTITY))


def resume(fork: Project, version: str) -> None:
    """Goes on after conflicts were resolved and added in the port's tree."""
    port, repo, _ = _open(fork, version)
    done = repo.run("cherry-pick", "--continue", env=IDENTITY) if repo.busy() else None
    _finish_or_explain(fork, port, repo, done)


def abort(fork: Project, version: str) -> None:
    """Puts the port's tree back as it was before the update."""
    port, repo, record = _open(fork, version)
    if repo.busy():
        repo("cherry-pick", "--abort")
    repo("reset", "--quiet", "--hard", record["head"])
    (port.tree / ".git" / _RECORD).unlink()
    print(f"{port.tree} is as it was; ports/{version} was not changed")


def _create(fork: Project, version: str, archive: Path | None) -> None:
    """Pins a release as a port without patches."""
    target = fork.build / "sdist" / f"megatron_core-{version}.tar.gz"
    if archive is None and not target.is_file():
        sdist.download(version, target.parent)
    pinned = archive or target
    text = _TEMPLATE.format(version=version, sdist=pinned.name, sha256=sdist.sha256(pinned))
    path = projects.port_file(fork.root, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"made {path}")


def _hooks_from(source: Project, repo: Repo) -> dict[str, str]:
    """Brings patches into a port's repository; slug to a commit of its hook alone."""
    with tempfile.TemporaryDirectory(prefix="fork-port-") as scratch:
        whole = Repo(Path(scratch) / "tree")
        base = series.make_base(whole.path, sdist.obtain(source), source.base.version)
        head = series.apply(whole, base, source.patch_files())
        whole("update-ref", "refs/heads/whole", head)
        refs = ("+refs/heads/whole:refs/fork/from", f"+{series.BASE_REF}:refs/fork/from-base")
        repo("fetch", "--quiet", "--no-tags", str(whole.path), *refs)
    return _hook_commits(source, repo, "refs/fork/from-base", "refs/fork/from")


def _hook_commits(project: Project, repo: Repo, base: str, head: str) -> dict[str, str]:
    """Slug to a commit like the patch's own, without any file that the series adds."""
    parent, files_of_base = repo.line("rev-parse", base), repo.files_of(base)
    commits, hooks = repo.commits(base, head), {}
    _require_one_each([spec.slug for spec in project.patches], commits, project)
    for spec, commit in zip(project.patches, commits, strict=True):
        files = {p: entry for p, entry in repo.files_of(commit).items() if p in files_of_base}
        parent = hooks[spec.slug] = export.recommit(repo, commit, parent, files)
    return hooks


def _require_one_each(slugs: list[str], commits: list[str], project: Project) -> None:
    if len(slugs) != len(commits):
        raise ForkError(
            f"{project.pin_name} asks for {len(slugs)} patches ({', '.join(slugs)}), but there are"
            f" {len(commits)} commits in {project.tree}. Each patch is one commit there."
        )


def _open(fork: Project, version: str) -> tuple[Project, Repo, dict]:
    port = projects.load(fork.root, version)
    path = port.tree / ".git" / _RECORD
    if not path.is_file():
        raise ForkError(f"no update is under way in {port.tree}. Start one: {port.make('port')}")
    return port, Repo(port.tree), json.loads(path.read_text())


def _finish_or_explain(fork: Project, port: Project, repo: Repo, done) -> None:
    """Exports a finished port, or says what conflicts and how to go on."""
    version, verb = port.base.version, f"python tools/fork.py port {port.base.version}"
    if repo.busy() or done is not None and done.returncode:
        conflicts = repo("diff", "--name-only", "--diff-filter=U").split()
        if not conflicts:
            said = (done.stdout + done.stderr).strip() if done else ""
            raise ForkError(f"the update stopped in {repo.path}:\n{said}\nGo on: {verb} --continue")
        subject = repo.line("log", "-1", "--format=%s", "CHERRY_PICK_HEAD")
        files = "\n".join(f"  {path}" for path in conflicts)
        raise ForkError(
            f"{subject!r} conflicts with megatron-core {version} in:\n{files}\n"
            f"Resolve them in {repo.path} and `git add` them there. Then go on: {verb} --continue."
            f" To leave the patch out: a [[left-out]] table in {port.pin_name}, `git cherry-pick"
            f" --skip` there, and --continue. To give up: {verb} --abort"
        )
    record = json.loads((port.tree / ".git" / _RECORD).read_text())
    now = projects.load(fork.root, version).port
    ported = {slug: digest for slug, digest in record["ported"].items() if slug not in now.left_out}
    _require_one_each(now.order(ported), repo.commits(series.BASE_REF, "HEAD"), port)
    head, _, _ = port.pin.read_text(encoding="utf-8").partition("[ported]\n")
    lines = "".join(f'{slug} = "{digest}"\n' for slug, digest in ported.items())
    port.pin.write_text(f"{head}[ported]\n{lines}", encoding="utf-8")
    export.write(projects.load(fork.root, version))
    (port.tree / ".git" / _RECORD).unlink()
    print(f"ports/{version} is up to date; run {port.make('test')}")
