"""The compiled helpers that upstream's own setup builds, compiled in place."""

import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path

SOURCE = Path("megatron/core/datasets/helpers.cpp")
FLAGS = ("-O3", "-Wall", "-std=c++17")


def target(tree: Path) -> Path:
    """Where the extension module of this interpreter lies in a tree."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return tree / SOURCE.with_name("helpers_cpp" + suffix)


def compile_helpers(tree: Path) -> str | None:
    """Compiles helpers_cpp if its source is newer.

    Returns:
        Why it could not be compiled, or None. As in upstream's setup the module is optional: only
        data sets need it.
    """
    source, module = tree / SOURCE, target(tree)
    if not source.is_file():
        return None
    if module.is_file() and module.stat().st_mtime >= source.stat().st_mtime:
        return None
    if importlib.util.find_spec("pybind11") is None:
        return "pybind11 is not installed in this Python"
    import pybind11

    compiler = os.environ.get("CXX", "c++")
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    partial = module.with_suffix(".partial")
    command = [compiler, *FLAGS, "-shared", "-fPIC", *includes, str(source), "-o", str(partial)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return f"no C++ compiler: {compiler} is not on PATH (set CXX)"
    if done.returncode:
        return f"{compiler} failed:\n{done.stderr.strip()}"
    partial.replace(module)
    return None
