"""What becomes of heads under overlapped DDP in a tree of Megatron: run as a script, once per tree.

    python ddp_faults.py OUTPUT

saves ``{case: "passes" or the error}`` as JSON. Uses nothing that the series adds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.support.ddp_training import Trainer, Training, global_batch, microbatches
from tests.support.device import prepare
from tests.support.models import ModelSpec, build_model
from tests.support.parallel import parallel_world
from tests.support.ranks import run_ranks

PASSES = "passes"


def three_steps(pp: int, tied: bool, toggles: str) -> str:
    """Train on token losses; "0" in ``toggles`` is a step whose model has no heads."""
    with parallel_world(pp=pp) as groups:
        trainer = Trainer(_spec(tied), Training(return_logits=False), groups)
        model = trainer.model.module
        heads = model.mtp_process, model.config.mtp_num_layers
        for step, on in enumerate(toggles):
            model.mtp_process, model.config.mtp_num_layers = heads if on == "1" else (False, None)
            trainer.step(microbatches(global_batch(step), groups))
    return PASSES


def tied_checkpoint() -> str:
    """Make the sharded state dict of a tied stage with heads."""
    with parallel_world(pp=2) as groups:
        build_model(_spec(tied=True), groups).sharded_state_dict()
    return PASSES


CASES = {
    "later stage": (three_steps, 2, False, "111"),
    "later stage, tied": (three_steps, 2, True, "111"),
    "later stage, tied, checkpoint": (tied_checkpoint,),
    "heads on, off, on": (three_steps, 1, False, "101"),
    "heads off, on, on": (three_steps, 1, False, "011"),
}


def outcomes() -> dict[str, str]:
    """Run every case on two ranks of its own."""
    found = {}
    for name, (run, *args) in CASES.items():
        try:
            (found[name],) = set(run_ranks(run, 2, *args))
        except AssertionError as error:
            found[name] = str(error)
    return found


def _spec(tied: bool) -> ModelSpec:
    return ModelSpec(
        tied=tied,
        hidden_size=16,
        num_attention_heads=2,
        dtype=torch.float32,
        overrides=dict(mtp_detach_heads=True),
    )


if __name__ == "__main__":
    # Ranks get functions by their module's name, which a script does not have.
    from tests.support import ddp_faults

    prepare()
    Path(sys.argv[1]).write_text(json.dumps(ddp_faults.outcomes()))
