"""Which messages the objective sends."""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import torch

TRANSPORTS = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "irecv",
    "isend",
]


@contextlib.contextmanager
def noting_calls_of_the_objective(called):
    """Append the name of every transport that a file of the objective or of the block calls.

    Metrics, which a training step does not wait for, are reduced when they are read.
    """
    with contextlib.ExitStack() as stack:
        for name in TRANSPORTS:
            real = getattr(torch.distributed, name)

            def noting(*args, name=name, real=real, **kwargs):
                file = sys._getframe(1).f_code.co_filename
                if "mtp_objective" in file or "multi_token_prediction" in file:
                    called.append(name)
                return real(*args, **kwargs)

            stack.enter_context(mock.patch.object(torch.distributed, name, noting))
        yield
