#!/usr/bin/env python
"""Entry point of the fork's tooling: `python tools/fork.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from forklib import environment  # noqa: E402  (this module runs on any Python 3)

if __name__ == "__main__":
    problem = environment.python_problem(sys.version_info)
    if problem:
        sys.exit("error: " + problem)

    from forklib import cli

    sys.exit(cli.main())
