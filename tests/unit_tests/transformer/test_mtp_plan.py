"""The plan of a microbatch: what each depth reads and is scored against, made once.

    python -m pytest tests/unit_tests/transformer/test_mtp_plan.py
"""

import types

import pytest
import torch

from tests.support import bshd_batch, device, prepare, thd_batch

prepare()

from megatron.core.transformer.mtp_objective.host_counts import HostCounts
from megatron.core.transformer.mtp_objective.options import MTPOptions
from megatron.core.transformer.mtp_objective.plan import plan_inputs, plan_microbatch
from megatron.core.transformer.mtp_objective.targets import depth_targets
from megatron.core.transformer.multi_token_prediction import roll_tensor

BATCHES = {
    "bshd": bshd_batch(2, 8, "prompt"),
    "packed": thd_batch((7, 3), None, "full"),
    "padded": thd_batch((7, 3), (8, 4), "full"),
}
DEPTHS = 3


def stage(heads=True, loss=True, mask_mode="target"):
    """What the plan asks a model about."""
    return types.SimpleNamespace(
        mtp_process=heads,
        post_process=loss,
        config=types.SimpleNamespace(mtp_num_layers=DEPTHS, mtp_loss_mask_mode=mask_mode),
        pg_collection=types.SimpleNamespace(cp=None, tp=None),
    )


def planned(model, batch, active=True, **changed):
    fields = dict(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        padding_mask=batch.input_ids == 0,
        packed_seq_params=batch.packed_seq_params,
    )
    options = MTPOptions(active=active, isolated=False)
    return plan_microbatch(model, options, **{**fields, **changed})


@pytest.mark.parametrize("layout", BATCHES)
def test_each_depth_reads_what_rolling_once_more_gives(layout):
    batch = BATCHES[layout]
    ids, positions, padding = batch.input_ids, batch.position_ids, batch.input_ids == 0
    plan = planned(stage(), batch).plan
    alone = plan_inputs(DEPTHS, ids, positions, padding, batch.packed_seq_params)
    params = batch.packed_seq_params
    for depth in range(DEPTHS):
        ids = roll_tensor(ids.clone(), packed_seq_params=params)[0]
        positions = roll_tensor(positions.clone(), packed_seq_params=params)[0]
        if layout == "padded":  # behind the end lies padding
            padding = ~roll_tensor(~padding, packed_seq_params=params)[0]
        else:
            padding = roll_tensor(padding.clone(), packed_seq_params=params)[0]
        for inputs in (plan.inputs_D[depth], alone[depth]):
            assert torch.equal(inputs.input_ids, ids)
            assert torch.equal(inputs.position_ids, positions)
            assert torch.equal(inputs.padding_mask, padding)


@pytest.mark.parametrize("mask_mode", ["target", "path"])
@pytest.mark.parametrize("labels", ["given", "derived"])
@pytest.mark.parametrize("layout", BATCHES)
def test_targets_are_those_of_a_call_without_a_plan(layout, labels, mask_mode):
    batch = BATCHES[layout]
    given = batch.labels if labels == "given" else None
    options = planned(stage(mask_mode=mask_mode), batch, labels=given)
    got, counts = options.plan.targets, options.plan.counts.read()
    params = batch.packed_seq_params
    want = depth_targets(
        given, batch.loss_mask, batch.input_ids, DEPTHS, mask_mode, packed_seq_params=params
    )
    assert torch.equal(got.mask_BS, want.mask_BS) and got.num_tokens == want.num_tokens
    for depth in range(DEPTHS):
        assert torch.equal(got.labels_DBS[depth], want.labels_DBS[depth])
        assert torch.equal(got.masks_DBS[depth], want.masks_DBS[depth])
        assert got.num_targets_D[depth] == want.num_targets_D[depth] == counts[depth]
    assert counts[0] > 0


def test_a_stage_plans_only_what_runs_on_it():
    batch = BATCHES["bshd"]
    heads_only = planned(stage(loss=False), batch, labels=None).plan
    assert len(heads_only.inputs_D) == DEPTHS and heads_only.targets is None
    loss_only = planned(stage(heads=False), batch).plan
    assert loss_only.inputs_D == () and loss_only.targets is not None
    assert planned(stage(heads=False, loss=False), batch).plan is None
    assert planned(stage(), batch, active=False).plan is None


def test_without_labels_and_ids_there_is_nothing_to_score():
    plan = planned(
        stage(heads=False), BATCHES["bshd"], labels=None, input_ids=None, loss_mask=None
    ).plan
    assert plan.targets is None and plan.counts is None


def test_bad_labels_are_refused_before_the_model_runs():
    with pytest.raises(TypeError, match="labels must hold token ids"):
        planned(stage(), BATCHES["bshd"], labels=BATCHES["bshd"].labels.float())


def test_counts_are_of_the_rows_that_are_not_zero():
    masks = [torch.tensor([[0.5, 0.0, -1.0]], device=device()), torch.zeros(1, 3, device=device())]
    assert HostCounts(masks).read() == [2, 0]
