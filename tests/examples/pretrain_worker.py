"""One training run of ``examples/pretrain`` with whatever a machine offers; run by torchrun.

    torchrun --nproc-per-node N pretrain_worker.py DIRECTORY FLAGS...

Each rank leaves ``rank-R.pt`` in the directory: what it printed, what it gave to W&B, and the final
parameters of its model.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from unittest import mock

import torch

from tests.support import has_gpu, standin
from tests.support.worker import main


def run(directory: str, *flags: str) -> None:
    """Train and record."""
    logged = install_wandb()
    if not has_gpu():
        standin.install_training()
    from megatron.core.models import backends
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    from examples.pretrain import pretrain_gpt
    from tests.support.attention import ReferenceAttention

    backends.DotProductAttention = ReferenceAttention  # of local specs: knows context parallelism
    models, original = [], training.setup_model_and_optimizer

    def setup(*args, **kwargs):
        result = original(*args, **kwargs)
        models.extend(unwrap_model(result[0]))
        return result

    training.setup_model_and_optimizer = setup
    sys.argv = [pretrain_gpt.__file__, *flags]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            pretrain_gpt.main()
    except BaseException:
        print(printed.getvalue()[-2000:], file=sys.stderr)
        raise
    parameters = {n: p.detach().cpu() for n, p in models[0].named_parameters()}
    record = dict(printed=printed.getvalue(), wandb=logged, parameters=parameters)
    torch.save(record, Path(directory) / f"rank-{os.environ['RANK']}.pt")


def install_wandb() -> list:
    """A module ``wandb`` that keeps what is logged: [(step, name, value)]."""
    logged: list = []

    def log(values: dict, step: int) -> None:
        logged.extend((step, name, float(value)) for name, value in values.items())

    sys.modules["wandb"] = mock.MagicMock(log=log)
    return logged


if __name__ == "__main__":
    main(run)
