"""`apply`: the series on a user's own Megatron checkout, and back."""

import json
import re
from pathlib import Path

from forklib import project as projects
from forklib import series
from forklib.errors import ForkError
from forklib.git import IDENTITY, Repo
from forklib.project import Project

_PACKAGE_INFO = "megatron/core/package_info.py"
# Inside git am's own folder, so that it goes when the session ends, however it ends.
_RECORD = "rebase-apply/fork-start.json"
_AM = ("am", "--no-message-id", "--whitespace=nowarn")
_QUIET = ("-c", "advice.mergeConflict=false", "-c", "apply.ignoreWhitespace=none")


def apply(project: Project, folder: Path, force: bool = False, three_way: bool = False) -> None:
    """Runs git am with the series in a checkout.

    Args:
        project: the fork.
        folder: top folder of the checkout.
        force: try a release of another minor version too.
        three_way: let git fall back on a 3-way merge, as `git am --3way` does.

    Raises:
        ForkError: the checkout is not clean or is another release; the series is applied already in
            another version; a patch does not apply (the am session is left open, as git does).
    """
    repo = _open(folder)
    if repo.busy():
        raise ForkError(_busy_message(repo))
    _require_clean(repo)
    _require_release(project, repo, force)
    files = project.patch_files()
    if not files:
        raise ForkError(f"{project.patches_dir} holds no patches. Run: make patches")
    if _already_applied(repo, files):
        print(f"the series is applied in {repo.path} already; nothing to do")
        return
    head = repo.line("rev-parse", "HEAD")
    untracked = _untracked(repo)
    identity = () if _has_identity(repo) else _identity_options()
    mode = "--3way" if three_way else "--no-3way"
    done = repo.run(*_QUIET, *identity, *_AM, mode, *map(str, files))
    if done.returncode:
        record = repo.git_path(_RECORD)
        if record.parent.is_dir():
            record.write_text(json.dumps({"head": head, "untracked": untracked}))
        raise ForkError(_failure_message(repo, done.stdout + done.stderr, files))
    print(f"applied {len(files)} patches in {repo.path}; undo: git reset --hard {head[:12]}")


def choose(root: Path, folder: Path, port: str | None = None) -> Project:
    """The series for a checkout: the one asked for, else the port of its minor release, if any."""
    if port is None and folder.is_dir() and (folder / _PACKAGE_INFO).is_file():
        minor = release_of(folder)[:2]
        fitting = [v for v in projects.port_versions(root) if _minor(v) == minor]
        port = fitting[0] if fitting and _minor(projects.load(root).base.version) != minor else None
    return projects.load(root, port)


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def abort(folder: Path) -> None:
    """Ends a git am session that `apply` left open and puts the checkout back as it was.

    Raises:
        ForkError: no such session is open, or HEAD was moved by other means meanwhile.
    """
    repo = _open(folder)
    record = repo.git_path(_RECORD)
    if not record.is_file():
        raise ForkError(
            f"expected a series half applied by `fork.py apply` in {repo.path}, but there is"
            f" {_a(repo.busy())}. Nothing was changed."
        )
    start = json.loads(record.read_text())
    repo("am", "--abort")
    head = repo.line("rev-parse", "HEAD")
    if head != start["head"]:
        raise ForkError(
            f"the am is over, but HEAD is {head[:12]}, not {start['head'][:12]} as before:"
            " commits were made by other means and git kept them. To drop them:"
            f" git -C {repo.path} reset --hard {start['head'][:12]}"
        )
    if _changes(repo):
        # The checkout was clean before, so whatever is left is a half-made resolution.
        repo("reset", "--quiet", "--hard", head)
    print(f"{repo.path} is as it was, at {head[:12]}")
    left = sorted(set(_untracked(repo)) - set(start["untracked"]))
    if left:
        print("these untracked files appeared meanwhile and were left alone: " + ", ".join(left))


def release_of(folder: Path) -> tuple[int, int, int]:
    """The release of a Megatron checkout as (major, minor, patch)."""
    path = folder / _PACKAGE_INFO
    if not path.is_file():
        raise ForkError(f"expected a Megatron-LM checkout, but {folder} has no {_PACKAGE_INFO}.")
    text = path.read_text(encoding="utf-8")
    numbers = [re.search(rf"^{n}\s*=\s*(\d+)", text, re.M) for n in ("MAJOR", "MINOR", "PATCH")]
    if not all(numbers):
        raise ForkError(f"{path} does not say MAJOR, MINOR and PATCH as numbers.")
    major, minor, patch = (int(number[1]) for number in numbers)
    return major, minor, patch


def _open(folder: Path) -> Repo:
    if not folder.is_dir():
        raise ForkError(f"expected the folder of a Megatron-LM checkout, but {folder} is none.")
    repo = Repo(folder.resolve(), isolated=False)
    done = repo.run("rev-parse", "--show-toplevel")
    if done.returncode:
        raise ForkError(f"expected a git checkout in {folder}, but git says: {done.stderr.strip()}")
    top = Path(done.stdout.rstrip("\n")).resolve()
    if top != repo.path:
        raise ForkError(f"expected the top folder of a checkout, but {folder} lies inside {top}.")
    if not repo.resolve("HEAD"):
        raise ForkError(f"{folder} has no commit yet; check out a release first.")
    return repo


def _a(busy: str | None) -> str:
    return f"another git {busy} in progress" if busy else "no git am in progress"


def _busy_message(repo: Repo) -> str:
    if repo.git_path(_RECORD).is_file():
        return (
            f"the series is half applied in {repo.path}. Resolve, git add, git am --continue."
            f" Or put everything back: python tools/fork.py apply {repo.path} --abort"
        )
    return f"expected no git operation in progress in {repo.path}, but there is {_a(repo.busy())}."


def _changes(repo: Repo) -> list[str]:
    entries = repo("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames")
    return [entry[3:] for entry in entries.split("\0") if entry]


def _untracked(repo: Repo) -> list[str]:
    listing = repo("ls-files", "--others", "--exclude-standard", "-z")
    return sorted(filter(None, listing.split("\0")))


def _require_clean(repo: Repo) -> None:
    changes = _changes(repo)
    if changes:
        shown = "\n".join(f"  {path}" for path in changes[:10])
        more = f"\n  and {len(changes) - 10} more" if len(changes) > 10 else ""
        raise ForkError(
            f"expected a clean checkout, but {repo.path} has uncommitted changes:\n{shown}{more}\n"
            "Commit or stash them first."
        )


def _require_release(project: Project, repo: Repo, force: bool) -> None:
    came = release_of(repo.path)
    version = ".".join(map(str, came))
    wanted = tuple(int(part) for part in project.base.version.split("."))
    if came[:2] != wanted[:2] and not force:
        raise ForkError(
            f"the series is for Megatron-Core {project.base.version}, but {repo.path} is {version}."
            f" Check out {project.base.upstream_tag} (or a {wanted[0]}.{wanted[1]} release), or try"
            " anyway: --force"
        )
    if came != wanted:
        print(f"note: the series is made for {project.base.version}; {repo.path} is {version}")


def _already_applied(repo: Repo, files: list[Path]) -> bool:
    """Whether HEAD has the files that the series adds; another version of them is an error."""
    wanted = {}
    for file in files:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
        pattern = r"^diff --git a/(.+) b/\1\nnew file mode \d+\nindex 0+\.\.([0-9a-f]{40})$"
        wanted |= dict(re.findall(pattern, text, re.MULTILINE))
    head = repo.files_of("HEAD")
    there = {path: head[path][1] for path in wanted if path in head}
    if not there:
        untracked = sorted(path for path in wanted if (repo.path / path).exists())
        if untracked:
            raise ForkError(
                f"the series adds {untracked[0]}, but {repo.path} has an untracked one."
                " Move it away."
            )
        return False
    if there == wanted:
        return True
    other = sorted(path for path in wanted if there.get(path) != wanted[path])
    raise ForkError(
        f"{repo.path} has another version of the series: {len(there)} of the {len(wanted)} files it"
        f" adds are there, and {len(other)} differ or are missing (first: {other[0]})."
        " Take that version out first (git revert or git reset)."
    )


def _has_identity(repo: Repo) -> bool:
    return repo.run("-c", "user.useConfigOnly=true", "var", "GIT_COMMITTER_IDENT").returncode == 0


def _identity_options() -> tuple[str, ...]:
    name, email = IDENTITY["GIT_COMMITTER_NAME"], IDENTITY["GIT_COMMITTER_EMAIL"]
    return ("-c", f"user.name={name}", "-c", f"user.email={email}")


def _failure_message(repo: Repo, said: str, files: list[Path]) -> str:
    lines = [series.describe_am_failure(repo, said, files)]
    patch = repo.git_path("rebase-apply/patch")
    if not patch.is_file():
        return "\n".join(lines)
    tried = repo.run("apply", "--check", "--verbose", str(patch)).stderr
    hunk = re.search(r"^error: while searching for:\n(.*?)\nerror: ", tried, re.M | re.S)
    if hunk:
        lines.append("  not found in the checkout:")
        lines += [f"    | {line}" for line in hunk[1].rstrip("\n").split("\n")]
    lines += [
        f"The patches before it are applied. Go on, in {repo.path}:",
        "  git am --show-current-patch=diff     (edit the files accordingly)",
        "  git add FILES && git am --continue",
        "Or put everything back as it was:",
        f"  python tools/fork.py apply {repo.path} --abort",
    ]
    return "\n".join(lines)
