"""Builds the patched distribution, megatron-core at version <base>+mtp.<n>.

MTP_PORT=<release> builds that port instead of the series.

`pip install .` unpacks the pinned sdist (from MEGATRON_CORE_SDIST, build/sdist or the package
index), applies patches/ to it and packages the result as upstream's own setup would, helpers_cpp
included. Name, dependencies and extras are those of upstream's pyproject.toml. build/tree is
neither needed nor touched.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from forklib import environment  # noqa: E402

problem = environment.python_problem(sys.version_info, sys.executable)
if problem:
    sys.exit("error: " + problem)

from forklib import distribution, project  # noqa: E402
from forklib.errors import ForkError  # noqa: E402
from pybind11.setup_helpers import Pybind11Extension  # noqa: E402
from setuptools import setup  # noqa: E402

try:
    fork = project.load(ROOT, os.environ.get("MTP_PORT") or None)
    tree = distribution.patched_tree(fork)
except ForkError as error:
    sys.exit(f"error: {error}")

setup(
    ext_modules=[Pybind11Extension(**distribution.extension(fork, tree))],
    **distribution.keywords(fork, tree),
)
