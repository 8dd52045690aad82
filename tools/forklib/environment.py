"""What the interpreter must offer. Written so that an old Python can still read it and say so."""

import os

MINIMUM = (3, 12)


def python_problem(version, executable="this interpreter"):
    """Returns why a Python of this version cannot be used, or None.

    Args:
        version: tuple that starts with (major, minor), such as `sys.version_info`.
        executable: what to call the interpreter in the message.
    """
    if tuple(version[:2]) >= MINIMUM:
        return None
    return (
        "Megatron-Core needs Python >= 3.12, but {} is Python {}.{}. `make` looks for a newer one"
        " (make PYTHON=/path/to/python3.12 names it); for a command of your own put one in front:"
        " .venv/bin/python tools/fork.py ..., python3.12 -m pip install .".format(
            executable, version[0], version[1]
        )
    )


def apex_problem(find_spec=None, find_version=None):
    """Returns why the installed `apex` breaks Megatron, or None.

    NVIDIA's apex has the package `apex.normalization`; the distribution of that name on the package
    index is an unrelated web toolkit, which Megatron takes for NVIDIA's and then fails to import.

    Args:
        find_spec: how a module is looked up; None: importlib.util.find_spec.
        find_version: how a distribution's version is; None: importlib.metadata.version.
    """
    import importlib.metadata
    import importlib.util

    find_spec = find_spec or importlib.util.find_spec
    find_version = find_version or importlib.metadata.version
    spec = find_spec("apex")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or []:
        if os.path.isdir(os.path.join(folder, "normalization")):
            return None
    try:
        what = "apex " + find_version("apex")
    except importlib.metadata.PackageNotFoundError:
        what = "a module called apex ({})".format(spec.origin)
    return (
        "expected NVIDIA's apex or none, but {} is installed: it has no apex.normalization, so"
        " it is the unrelated web toolkit of that name, and Megatron fails to import it. Remove"
        " it: python -m pip uninstall apex".format(what)
    )
