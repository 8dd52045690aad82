#!/usr/bin/env python
"""Entry point of the fork's tooling: `python tools/fork.py --help`."""

import sys

from forklib import environment  # this module runs on any Python

if __name__ == "__main__":
    problem = environment.python_problem(sys.version_info)
    if problem:
        sys.exit("error: " + problem)

    from forklib import cli

    sys.exit(cli.main())
