"""A router that chooses otherwise at one depth touches all that later depths attend to.

    pytest tests/tools/mtp_checkpoint/test_comparing_chain.py
"""

import dataclasses

import torch

from tests.support import parallel_world, prepare
from tests.support.device import device
from tests.tools.mtp_checkpoint.native_support import Kind, directory, reference
from tools.mtp_checkpoint.comparing import run_native
from tools.mtp_checkpoint.comparing_chain import compare_later_steps
from tools.mtp_checkpoint.importing import import_head
from tools.mtp_checkpoint.native.layer import build_mtp_block
from tools.mtp_checkpoint.reference_chain import trained_chain
from tools.mtp_checkpoint.served import Served
from tools.mtp_checkpoint.verify_options import LIMITS
from tools.mtp_checkpoint.verify_rows import random_rows

prepare()

DEPTHS, ROWS = 2, (8, 32)
KIND = Kind("qwen3_5_moe", "packed", "fp32")


def pushed_head(groups):
    """A head whose router's logits are off by a little: some rows choose other experts."""
    source, served = directory(KIND), Served(DEPTHS)
    head = build_mtp_block(source.config, groups=groups, device=device(), served=served)
    import_head(source, head, groups)
    weight = head.mtp.layers[0].mtp_model_layer.mlp.router.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.data += 1e-3 * noise.to(weight.device)
    return head.eval()


def test_rows_behind_a_flip_are_touched_at_the_next_depth_and_their_own_flips_are_not_fresh():
    rows = random_rows(directory(KIND), *ROWS, 0)
    no_ties = dataclasses.replace(LIMITS["local"], tie_gap=0.0)
    with parallel_world() as groups, torch.no_grad():
        head = pushed_head(groups)
        (step,) = compare_later_steps(head, reference(KIND), rows, no_ties)
        native = run_native(head, reference(KIND), rows, rows.hidden_BSH)
        given = (rows.token_ids_BS, rows.position_ids_BS, rows.hidden_BSH, DEPTHS, "vllm")
        wanted = trained_chain(reference(KIND), *given)
    first_BS, second_BS = (
        (chosen_BSE != routing.chosen_BSE).any(-1)
        for (_, chosen_BSE), (_, routing) in zip(native, wanted, strict=True)
    )
    touched = fresh = flipped = 0
    for first_S, second_S in zip(first_BS.tolist(), second_BS.tolist(), strict=True):
        for t in range(ROWS[1] - DEPTHS - 1):
            behind = any(first_S[: t + 1])
            touched += behind or second_S[t]
            fresh += second_S[t] and not behind
            flipped += second_S[t]
    assert fresh < flipped < touched < ROWS[0] * (ROWS[1] - DEPTHS - 1)
    assert (step.touched, step.flips_beyond_ties) == (touched, fresh)
