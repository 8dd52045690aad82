#!/usr/bin/env python
"""What is installed, what of the series will work with it, and what to install for the rest.

    make doctor
    PYTHONPATH=path/to/Megatron-LM python tools/doctor.py

Exit status: 0 if nothing is wrong (optional packages may be missing), 1 if something is.
"""

import sys

from forklib import environment  # this module runs on any Python

if __name__ == "__main__":
    problem = environment.python_problem(sys.version_info)
    if problem:
        sys.exit("error: " + problem)

    from forklib import doctor

    sys.exit(doctor.main(__doc__))
