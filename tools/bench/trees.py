"""Two releases of Megatron-Core in one process: ours, and the one below our series.

A module is found by its name in ``sys.modules``, so each tree keeps its own set of them and the
active tree's set is the one that is in there. Functions of Megatron import by name while they run:
everything of a tree, backward passes included, must run inside its ``active()`` block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Iterator

# Test support that derives from Megatron's classes when it is imported.
_BOUND_TO_A_TREE = ("tests.support.attention", "tests.support.hybrid_spec")
_active: list[str] = []


@dataclasses.dataclass
class Tree:
    """One release.

    Attributes:
        name: "upstream" or "ours".
        path: its top folder.
        modules: what it has imported so far, while it is not active.
    """

    name: str
    path: Path
    modules: dict[str, ModuleType] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make ``import megatron`` mean this tree inside the block.

        Raises:
            RuntimeError: another tree is active.
        """
        if _active and _active[-1] != self.name:
            raise RuntimeError(f"tree {self.name!r} inside the block of {_active[-1]!r}")
        _active.append(self.name)
        if len(_active) > 1:  # nested in its own block
            try:
                yield
            finally:
                _active.pop()
            return
        outside, path = _take_modules(), list(sys.path)
        sys.modules.update(self.modules)
        sys.path.insert(0, str(self.path))
        try:
            yield
        finally:
            self.modules = _take_modules()
            sys.modules.update(outside)
            sys.path[:] = path
            _active.pop()

    def load(self, name: str) -> ModuleType:
        """Import a module of this tree."""
        with self.active():
            return importlib.import_module(name)


@dataclasses.dataclass
class Pair:
    """Both trees, with their process groups once a world is up."""

    upstream: Tree
    ours: Tree
    groups: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __iter__(self) -> Iterator[Tree]:
        return iter((self.upstream, self.ours))

    @contextlib.contextmanager
    def world(self, cp: int = 1) -> Iterator[None]:
        """Start torch.distributed once and the model-parallel groups of both trees."""
        from tests.support import parallel_world

        with self.ours.active():
            world = parallel_world(cp=cp)
            self.groups["ours"] = world.__enter__()
        try:
            with self.upstream.active():
                self.groups["upstream"] = _second_world(cp)
            yield
            with self.upstream.active():
                importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
        finally:
            self.groups.clear()
            with self.ours.active():
                world.__exit__(*sys.exc_info())


def unpack_upstream(folder: Path) -> Path:
    """Unpack the release below the series into a subfolder per version; returns the subfolder.

    Raises:
        NoUnpatchedTree: see `tests.support.unpatched`.
    """
    from tests.support import prepare
    from tests.support.unpatched import unpatched_tree

    prepare()
    version = importlib.import_module("megatron.core").__version__
    return unpatched_tree(folder.resolve() / f"unpatched-{version}")


@functools.cache
def load_pair(upstream_path: Path) -> Pair:
    """Import both trees: megatron.core of this process's path, and upstream's.

    Loaded once per process; forked ranks inherit it.

    Args:
        upstream_path: what `unpack_upstream` returned.
    """
    from tests.support import has_gpu, prepare
    from tests.support.unpatched import patched_tree

    prepare()
    ours, upstream = Tree("ours", patched_tree()), Tree("upstream", upstream_path)
    ours.modules = _take_modules()
    with upstream.active():
        import tests.support.standin.megatron_cuda as megatron_cuda
        import tests.support.standin.without_te as without_te

        # torch's own functions have been replaced already; these two replace Megatron's.
        without_te.install()
        if not has_gpu():
            megatron_cuda.install()
    for tree in (upstream, ours):
        found = Path(tree.load("megatron.core").__file__).resolve()
        if not found.is_relative_to(tree.path):
            raise RuntimeError(f"expected megatron.core from {tree.path}, but it is {found}")
    return Pair(upstream, ours)


def _second_world(cp: int) -> Any:
    """Megatron's groups for another tree in a running torch.distributed world."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        context_parallel_size=cp, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


def _take_modules() -> dict[str, ModuleType]:
    """Remove every module that belongs to a tree from ``sys.modules`` and return them."""
    names = [
        name for name in sys.modules if name.split(".")[0] == "megatron" or name in _BOUND_TO_A_TREE
    ]
    return {name: sys.modules.pop(name) for name in names}
