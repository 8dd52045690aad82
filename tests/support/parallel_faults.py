"""What padding masks, dynamic groups and handed-through biases become in a tree of Megatron.

    python parallel_faults.py OUTPUT

saves what `outcomes` returns as JSON. Uses nothing that the series adds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.batches import bshd_batch, cp_shard, thd_batch
from tests.support.device import device, prepare
from tests.support.gradients import worst_difference
from tests.support.models import ModelSpec, build_model
from tests.support.objective import step_gradients
from tests.support.parallel import parallel_world
from tests.support.ranks import run_ranks
from tests.support.standin import fp64_cross_entropy
from tests.support.whole_gradients import whole_gradients

PASSES = "passes"


def padding_mask(lengths=(3, 5)) -> torch.Tensor:
    """bool [2, 8], true where there is padding."""
    return torch.arange(8, device=device()) >= torch.tensor(lengths, device=device())[:, None]


def masked_gradients(
    tp: int, family: str = "gpt", balancing: str = "aux_loss", masked: bool = True
) -> dict[str, torch.Tensor]:
    """Where the mask counts: in the load-balancing loss of the experts of decoder and heads."""
    spec = ModelSpec(
        family=family,
        num_experts=4,
        hidden_size=16,
        num_layers=1,
        overrides=dict(
            sequence_parallel=tp > 1,
            moe_router_load_balancing_type=balancing,
            moe_aux_loss_coeff=0.1,
            moe_token_dispatcher_type="alltoall",
        ),
    )
    with fp64_cross_entropy(), parallel_world(tp=tp) as groups:
        model = build_model(spec)
        forward = dict(padding_mask=padding_mask()) if masked else {}
        step_gradients(model, bshd_batch(2, 8), **forward)
        return whole_gradients([model], groups)


def dynamic_group() -> str:
    """A packed row over a group of two, in a model without context parallelism or heads."""
    with parallel_world():
        batch = thd_batch((7, 3), (8, 4))
        params = batch.packed_seq_params
        params.cp_group, params.local_cp_size = dist.group.WORLD, 2
        model = build_model(ModelSpec(mtp_num_layers=0, hidden_size=16))
        mine = cp_shard(batch, 2, dist.get_rank())
        step_gradients(model, mine, 1.0, packed_seq_params=params)
    return PASSES


def handed_bias() -> bool:
    """Whether a parameter that a checkpointed function returns is still a leaf.

    If not, backward would recurse without end: this does not run it.
    """
    from megatron.core.tensor_parallel.random import checkpoint

    bias = torch.nn.Parameter(torch.ones(1))
    with parallel_world():
        checkpoint(lambda row: (2 * row, bias), False, torch.ones(1, requires_grad=True))
    return bias.is_leaf


def outcomes() -> dict[str, Any]:
    """Worst relative differences, errors and the answer of `handed_bias`."""
    split = run_ranks(masked_gradients, 2, 2)[0]
    with_mask, without = (masked_gradients(1, "hybrid", masked=m) for m in (True, False))
    routers = [name for name in with_mask if ".router.weight" in name and "mtp" in name]
    pairs = [{name: found[name] for name in routers} for found in (with_mask, without)]
    return {
        "shifted parts": worst_difference(split, masked_gradients(1))[0],
        "hybrid heads": worst_difference(*pairs)[0],
        "hybrid parts": _outcome(masked_gradients, 2, "hybrid"),
        "dynamic group": _outcome(dynamic_group),
        "handed bias": handed_bias(),
    }


def _outcome(rank_function, *args) -> str:
    try:
        run_ranks(rank_function, 2, *args)
    except AssertionError as error:
        return str(error)
    return PASSES


if __name__ == "__main__":
    # Ranks get functions by their module's name, which a script does not have.
    from tests.support import parallel_faults

    prepare()
    Path(sys.argv[1]).write_text(json.dumps(parallel_faults.outcomes()))
