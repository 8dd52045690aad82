"""RL frameworks from PyPI, imported beside the tree that is tested.

`tools/clients.py` installs them, each into a folder of its own, and says which of their imports are
stubs. A framework's folder goes to the end of ``sys.path`` and its stubs into ``sys.meta_path``:
`import_client` is called in a rank of `run_ranks`, so that neither reaches another test.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

import pytest

from tools.clients import CLIENTS, installed


def needs_client(name: str) -> pytest.MarkDecorator:
    """Skips a test where the framework is not installed."""
    return pytest.mark.skipif(
        not installed(name), reason=f"{CLIENTS[name].requirements[0]} is not there: make clients"
    )


def import_client(name: str) -> None:
    """Make a framework's modules importable in this process."""
    client = CLIENTS[name]
    if str(client.folder) in sys.path:
        return
    sys.path.append(str(client.folder))
    sys.meta_path.insert(0, StubFinder(client.stubbed))
    for package in client.bare:
        module = types.ModuleType(package)
        module.__path__ = [str(client.folder.joinpath(*package.split(".")))]
        sys.modules[package] = module


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that a framework imports and the tested path never calls."""

    def __init__(self, names: tuple[str, ...]):
        """``names``: packages, with all that is below them."""
        self._names = names

    def find_spec(self, name, path=None, target=None):
        """A stub for what is listed, nothing for others."""
        if any(f"{name}.".startswith(f"{stubbed}.") for stubbed in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        """The stub."""
        return _Stub(spec.name)

    def exec_module(self, module):
        """Nothing to run."""


class _Stub(types.ModuleType):
    """A module in which every capitalised name is an empty class, every other one `_anything`."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[0].isupper() else _Anything()
        setattr(self, name, made)
        return made


class _Anything:
    """Has every attribute; called with a function or class alone, as a decorator is, returns it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return _Anything()
