"""The worker's side of a torchrun launch: run a rank function and hand its result back.

A script launched by `tests.support.launch` ends with::

    if __name__ == "__main__":
        main(compare_gradients)

where ``compare_gradients`` is what `run_ranks` would run: it opens a `parallel_world` and returns
something. Arguments of the launch are passed to it as strings.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Callable

from tests.support.device import prepare

RESULT_VARIABLE = "MTP_TEST_RESULT"  # file for rank 0's result


def main(fn: Callable[..., Any]) -> None:
    """Prepare the device, run ``fn(*sys.argv[1:])``, and write rank 0's result as JSON.

    Args:
        fn: The rank function. Its result must be JSON-serialisable on rank 0; without
            `launch` the result is printed instead.
    """
    prepare()
    result = fn(*sys.argv[1:])
    if int(os.environ.get("RANK", "0")) != 0:
        return
    text = json.dumps(result)
    if RESULT_VARIABLE in os.environ:
        Path(os.environ[RESULT_VARIABLE]).write_text(text)
    else:
        print(text)
