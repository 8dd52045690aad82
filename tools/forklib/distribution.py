"""What setup.py packages: a patched tree of its own, and upstream's metadata for it."""

import json
import shutil
import tomllib
from pathlib import Path

from forklib import native, sdist, series
from forklib import tree as trees
from forklib.git import Repo
from forklib.project import Project

# Upstream's own selection, in its pyproject.toml.
_TOPS = ("megatron/core", "megatron/training")


def patched_tree(project: Project) -> Path:
    """Makes build/dist/tree from the pinned sdist and patches/, unless it is there already."""
    target = project.build / "dist" / "tree"
    stamp = target / ".git" / "fork-dist.json"
    wanted = json.dumps({"base": project.base.sha256, "patches": trees.digest(project)})
    if stamp.is_file() and stamp.read_text() == wanted:
        return target
    archive = sdist.obtain(project)
    # With setuptools' own output beside it: files of an older series must not reach the next wheel.
    shutil.rmtree(target.parent, ignore_errors=True)
    base = series.make_base(target, archive, project.base.version)
    repo = Repo(target)
    repo("reset", "--quiet", "--hard", series.apply(repo, base, project.patch_files()))
    stamp.write_text(wanted)
    return target


def extension(project: Project, tree: Path) -> dict:
    """Arguments of the extension module, as in upstream's setup.py."""
    source = (tree / native.SOURCE).relative_to(project.root)
    return {
        "name": "megatron.core.datasets.helpers_cpp",
        "sources": [str(source)],
        "language": "c++",
        "extra_compile_args": list(native.FLAGS),
        "optional": True,
    }


def keywords(project: Project, tree: Path) -> dict:
    """Arguments of setup(): upstream's metadata, our version, and every file of its packages.

    Args:
        project: the fork; its root must be the current folder.
        tree: the patched tree, below that root.
    """
    meta = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    relative = tree.relative_to(project.root)
    data: dict[str, list[str]] = {}
    for path in Repo(tree).files_of("HEAD"):
        if path.startswith(tuple(top + "/" for top in _TOPS)):
            folder, _, name = path.rpartition("/")
            data.setdefault(folder.replace("/", "."), []).append(name)
    return {
        "name": meta["name"],
        "version": project.version,
        "description": meta["description"],
        "long_description": (tree / "README.md").read_text(encoding="utf-8"),
        "long_description_content_type": "text/markdown",
        "license": meta["license"]["text"],
        "author": meta["authors"][0]["name"],
        "author_email": meta["authors"][0]["email"],
        "classifiers": meta["classifiers"],
        "python_requires": meta["requires-python"],
        "install_requires": meta["dependencies"],
        "extras_require": meta["optional-dependencies"],
        "packages": sorted(data),
        "package_dir": {"megatron": str(relative / "megatron")},
        "package_data": data,
        "include_package_data": False,
        "options": {
            "build": {"build_base": str(relative.parent)},
            "bdist_wheel": {"bdist_dir": str(relative.parent / "wheel")},
            "egg_info": {"egg_base": str(relative.parent)},
        },
    }
