"""Given embeddings where stages, groups or schedules decide who holds them.

    python -m pytest tests/unit_tests/transformer/test_mtp_given_embeddings_stages.py
"""

import os

import pytest
import torch.distributed as dist

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_model,
    cp_shard,
    fp64_cross_entropy,
    parallel_world,
    prepare,
    run_ranks,
    thd_batch,
    worst_difference,
)
from tests.support.claims import supports
from tests.support.objective import nonzero, step_gradients
from tests.support.overlap import overlap_spec, plan_gradients
from tests.support.release import require_overlap_on_one_stage
from tests.support.split import Comparison, SplitCase, case_gradients, heads_of
from tests.support.vision import EMBEDDING, given_rows, placeholders
from tests.support.whole_gradients import whole_gradients

prepare()

AXIS = "Given embeddings (vision-language batches)"
SPEC = ModelSpec(num_layers=2, hidden_size=16)
CASES = {
    "PP=2, heads with the embedding, Ettmm|L": {},
    "PP=2, heads with the embedding, Ettmm|L, isolated": dict(mtp_isolated_loss=True),
}
GIVEN = dict(decoder_input=given_rows(bshd_batch(2, 8), SPEC).detach(), input_ids=None)


def _on_stages(layout, overrides, **forward):
    overrides = dict(pipeline_model_parallel_layout=layout, **overrides)
    return SplitCase(dict(pp=2), {}, overrides, forward={**GIVEN, **forward})


COMPARISON = Comparison({case: _on_stages("Ettmm|L", more) for case, more in CASES.items()})


@supports(AXIS, agrees=1e-12, ranks=2)
@pytest.mark.parametrize("case", CASES)
def test_heads_on_the_stage_of_the_embedding_read_what_it_was_given(case):
    got, want = COMPARISON.of(case)
    assert worst_difference(got, want)[0] <= 1e-12
    assert set(heads_of(want)) <= nonzero(got)


def _labels_on_the_last_stage_alone(overrides):
    unlabelled = {} if os.environ["RANK"] == "1" else dict(labels=None, loss_mask=None)
    return case_gradients(_on_stages("Ettmm|L", overrides, **unlabelled))


@pytest.mark.parametrize("case", CASES)
def test_heads_need_not_see_the_labels_to_read_what_the_embedding_was_given(case):
    """Trainers hand labels to the stage with the loss."""
    got = run_ranks(_labels_on_the_last_stage_alone, 2, CASES[case])[0]
    _, want = COMPARISON.of(case)
    assert worst_difference(got, want)[0] <= 1e-12


@supports(AXIS, refused="decoder_input is given to the pipeline stage with the embedding", ranks=2)
@pytest.mark.parametrize(
    "family", ["gpt", "hybrid"], ids="PP=2, heads on the last stage, {}".format
)
def test_pipelines_with_the_heads_on_another_stage(family):
    """All ranks end, with the message of the first one."""
    case = SplitCase(dict(pp=2), dict(family=family), forward=GIVEN)
    with pytest.raises(AssertionError) as failed:
        Comparison({family: case}).of(family)
    assert "with the heads on the first stage, such as 'Ettm|L'" in str(failed.value)
    assert "pass compute_mtp_loss=False" in str(failed.value)


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_the_same_pipelines_run_without_heads(family):
    forward = dict(GIVEN, compute_mtp_loss=False)
    case = SplitCase(dict(pp=2), dict(family=family), forward=forward)
    got, want = Comparison({family: case}).of(family)
    assert worst_difference(got, want)[0] <= 1e-12
    assert nonzero(got) == set(want) - set(heads_of(want)) - {EMBEDDING}


def _overlapped():
    with parallel_world(ep=2):
        model, batch = build_model(overlap_spec()), bshd_batch(2, 8)
        rows = given_rows(batch, overlap_spec())
        forward = {**batch.forward_kwargs(), "decoder_input": rows, "input_ids": None}
        with pytest.raises(ValueError, match="not isolated: two of its nodes"):
            model.build_schedule_plan(**forward)
        found = []
        for change in (dict(mtp_isolated_loss=True), dict(compute_mtp_loss=False)):
            want = step_gradients(model, None, 1.0, **forward, **change)
            want["rows"], rows.grad = rows.grad, None
            got = plan_gradients(model, 1.0, **forward, **change)
            got["rows"], rows.grad = rows.grad, None
            found.append((want, got))
        return found


@supports(AXIS, equal="`forward`", ranks="EP=2 on 2")
def test_a_schedule_plan_of_isolated_heads_with_given_embeddings():
    require_overlap_on_one_stage()
    for rank in run_ranks(_overlapped, 2):
        for (want, got), heads_run in zip(rank, (True, False)):
            assert worst_difference(got, want)[0] == 0.0
            assert bool(set(heads_of(want)) & nonzero(want)) == heads_run
            assert "rows" in nonzero(want)


PACKED = [thd_batch((7, 3), (8, 4)), thd_batch((4, 11), (4, 12), "prompt")]


def _dynamic(isolated):
    spec = ModelSpec(hidden_size=16, per_token=True, overrides=dict(mtp_isolated_loss=isolated))
    with fp64_cross_entropy(), parallel_world() as groups:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        batch, pair = PACKED[dist.get_rank() // 2], pairs[dist.get_rank() // 2]
        params = batch.packed_seq_params
        params.cp_group, params.local_cp_size = pair, 2
        mine = cp_shard(batch, 2, pair.rank())
        given = dict(decoder_input=given_rows(mine, spec), input_ids=placeholders(mine))
        model = build_model(spec)
        step_gradients(model, mine, packed_seq_params=params, **given)
        found = whole_gradients([model], groups)
        for group in pairs:
            dist.destroy_process_group(group)
        return found


@supports(AXIS, agrees=1e-12, ranks="dynamic CP=2 of 4 data-parallel")
@pytest.mark.parametrize("isolated", [False, True], ids=["packed, attached", "packed, isolated"])
def test_the_context_parallel_group_of_the_batch_shifts_rows(isolated):
    spec = ModelSpec(hidden_size=16, per_token=True, overrides=dict(mtp_isolated_loss=isolated))
    with fp64_cross_entropy(), parallel_world():
        model = build_model(spec)
        each = [
            step_gradients(model, batch, decoder_input=given_rows(batch, spec)) for batch in PACKED
        ]
    want = {name: each[0][name] + each[1][name] for name in each[0]}
    assert worst_difference(run_ranks(_dynamic, 4, isolated)[0], want)[0] <= 1e-12
