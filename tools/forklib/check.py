"""`check`: every way in which pin, patches, added files and upstream could have drifted apart."""

import tempfile
from pathlib import Path

from forklib import prefixes, sdist, series
from forklib.errors import ForkError
from forklib.export import rebuild
from forklib.git import Repo, blob_id
from forklib.project import Project
from forklib.report import Report

HOOK_AIM = 50
_TRAILERS = ("Upstream", "Remove-when", "Tests")
_ADDABLE = ("megatron/", "tests/")


def run(project: Project, run_tests: bool = True, only: str | None = None) -> Report:
    """Runs every check; needs no build/tree.

    Args:
        project: the fork.
        run_tests: also import every prefix of the series and run its tests.
        only: slug of the one patch whose prefix is run; None: of all.

    Raises:
        ForkError: the sdist is not the pinned one, or a patch does not apply; nothing after that
            can be checked.
    """
    report = Report()
    folder = project.patches_name
    report.step(f"{folder}/ holds the series and nothing else", _folder_problems(project))
    report.step("every added file belongs to one patch", project.ownership_problems())
    archive = sdist.obtain(project)
    report.step(f"sdist hash is the pinned one ({project.base.sha256[:12]}…)", [])
    with tempfile.TemporaryDirectory(prefix="fork-check-") as scratch:
        repo = Repo(Path(scratch) / "tree")
        base = series.make_base(repo.path, archive, project.base.version)
        files = project.patch_files()
        head = series.apply(repo, base, files)
        report.step(f"{len(files)} patches apply without 3-way and without fuzz", [])
        commits = repo.commits(base, head)
        report.step("patched tree is the pinned one", _pin_problems(project, repo, head))
        report.step("added files equal their copies here", _copy_problems(project, repo, head))
        if not project.ownership_problems():
            report.step("re-export is byte-identical", _export_problems(project, repo, head))
        for number, commit in enumerate(commits, start=1):
            name = files[number - 1].name if number <= len(files) else commit[:12]
            found, warnings = _commit_problems(repo, commit, name)
            report.step(f"{name}: scope and trailers", found)
            report.warnings += warnings
        if run_tests:
            last = {spec.slug: spec.filename for spec in project.patches}.get(only, only)
            prefixes.run(repo, commits, [path.name for path in files], report, last)
    for line in report.warnings:
        print(f"warning: {line}")
    return report


def _folder_problems(project: Project) -> list[str]:
    """patches/ against the tables of fork.toml."""
    if not project.patches_dir.is_dir():
        return [f"{project.patches_dir} does not exist. Run: {project.make('patches')}"]
    folder, run = project.patches_name, f"Run: {project.make('patches')}"
    problems = []
    names = sorted(path.name for path in project.patches_dir.iterdir())
    for name in names:
        if not name.endswith(".patch"):
            problems.append(
                f"{folder}/{name} is not a *.patch file; git am would stop at it. Move it."
            )
        elif not (project.patches_dir / name).stat().st_size:
            problems.append(f"{folder}/{name} is empty; git am would stop at it. {run}")
    patches = [name for name in names if name.endswith(".patch")]
    for number, name in enumerate(patches, start=1):
        if not name.startswith(f"{number:04d}-"):
            problems.append(
                f"{folder}/{name} must have number {number:04d}: the numbering has a gap."
            )
            break
    expected = [spec.filename for spec in project.patches]
    for name in sorted(set(expected) - set(names)):
        problems.append(f"{folder}/{name} is missing: {project.pin_name} has its table. {run}")
    for name in sorted(set(patches) - set(expected)):
        problems.append(
            f"{folder}/{name} has no [[patch]] table at its position in {project.pin_name}."
        )
    return problems


def _pin_problems(project: Project, repo: Repo, head: str) -> list[str]:
    came = repo.tree_of(head)
    if came == project.pinned_tree:
        return []
    return [
        f"{project.pin_name} pins tree {project.pinned_tree or '(none)'}, but"
        f" {project.patches_name}/ give {came}."
        f" If the patches are right, run: {project.make('patches')}"
    ]


def _copy_problems(project: Project, repo: Repo, head: str) -> list[str]:
    """The files the series adds against the copies here, in both directions."""
    base = repo.files_of(series.BASE_REF)
    patched = {p: entry for p, entry in repo.files_of(head).items() if p not in base}
    copies = project.added_files()
    run = f"Run: {project.make('patches')}"
    problems = [
        f"{path} is here but no patch adds it. {run}"
        for path in sorted(set(copies) - set(patched))
    ]
    problems += [
        f"{path} is added by a patch but missing here. Restore it, or: {run}"
        for path in sorted(set(patched) - set(copies))
    ]
    for path in sorted(set(patched) & set(copies)):
        mode = "100755" if copies[path].stat().st_mode & 0o100 else "100644"
        if patched[path] != (mode, blob_id(copies[path].read_bytes())):
            problems.append(f"{path} here differs from what its patch adds. {run}")
    return problems


def _export_problems(project: Project, repo: Repo, head: str) -> list[str]:
    try:
        exported = rebuild(project, repo, head)
    except ForkError as error:
        return [str(error)]
    problems = []
    for name, text in exported.patches.items():
        path = project.patches_dir / name
        same = path.is_file() and path.read_bytes() == text.encode("utf-8", "surrogateescape")
        if not same:
            problems.append(
                f"{project.patches_name}/{name} is not what an export writes."
                f" Run: {project.make('patches')}"
            )
    return problems


def _commit_problems(repo: Repo, commit: str, name: str) -> tuple[list[str], list[str]]:
    """Scope, message and trailers of one patch: (failures, warnings)."""
    problems, warnings = [], []
    changes = repo("diff-tree", "-r", "--no-commit-id", "--no-renames", "--name-status", commit)
    base = repo.files_of(series.BASE_REF)
    for line in filter(None, changes.split("\n")):
        status, path = line.split("\t", 1)
        if path in base and not path.startswith("megatron/"):
            problems.append(f"{name} changes upstream's {path}; only megatron/** may be hooked.")
        elif path not in base and not path.startswith(_ADDABLE):
            problems.append(f"{name} adds {path}; only megatron/** and tests/** may be added.")
        elif path not in base and status != "A":
            problems.append(f"{name} changes {path}, which an earlier patch adds.")
    described = series.describe(repo, commit)
    for key in _TRAILERS:
        if not any(described.values(key)):
            problems.append(f"{name} lacks the trailer `{key}:`. Reword its commit in build/tree.")
    if not described.body:
        problems.append(f"{name} has no body. Say why it exists and what happens when it is off.")
    files = repo.files_of(commit)
    for path in prefixes.test_paths(described):
        if path not in files and not any(p.startswith(path.rstrip("/") + "/") for p in files):
            problems.append(f"{name}: `Tests:` names {path}, which the tree up to here lacks.")
    size = hook_size(repo, commit, base)
    if size > HOOK_AIM:
        warnings.append(f"{name} adds {size} lines to upstream files (aim: at most {HOOK_AIM}).")
    return problems, warnings


def hook_size(repo: Repo, commit: str, base: dict) -> int:
    """How many lines a patch adds to upstream's files."""
    total = 0
    for line in repo("diff-tree", "-r", "--no-commit-id", "--numstat", commit).split("\n"):
        added, _, path = line.split("\t", 2) if line else ("0", "", "")
        if path in base and added.isdigit():
            total += int(added)
    return total
