"""Metrics of the heads of whole models: per model, over any ranks, in one call.

    python -m pytest tests/unit_tests/transformer/test_mtp_metrics_models.py
"""

import dataclasses
import math

import pytest
import torch

from tests.support import (
    ModelSpec,
    bshd_batch,
    build_model,
    cp_shard,
    parallel_world,
    prepare,
    run_ranks,
)

prepare()

from megatron.core.transformer.mtp_objective.metrics import mtp_metrics
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


@pytest.fixture
def world():
    """Groups of one rank."""
    with parallel_world() as groups:
        yield groups


@dataclasses.dataclass
class Case:
    """A batch whose labels the heads partly predict, and the right metrics of its model."""

    batch: object
    losses: list
    acceptance: list
    supervised: list
    accepted_length: float


SPEC = ModelSpec(hidden_size=16, num_attention_heads=2)


def predictable_case(family="gpt") -> Case:
    """Compute on one rank, with loops, what the metrics must be."""
    model = build_model(dataclasses.replace(SPEC, family=family))
    batch = bshd_batch(2, 16, mask=[[1] * 16, [0] * 5 + [1, 0] + [1] * 9])
    logits_DBSV = heads_logits(model, batch)
    predicted_DBS = logits_DBSV.argmax(-1)
    labels_BS = batch.labels.clone()
    for t in range(1, 16):  # each label is what depth 1, or in every third place depth 2, predicts
        labels_BS[:, t] = predicted_DBS[0, :, t - 1] if t % 3 else predicted_DBS[1, :, t - 2]
    batch = dataclasses.replace(batch, labels=labels_BS)
    losses, acceptance, supervised, right = [], [], [], {}
    for k in (1, 2):
        values, hits = [], []
        for b, t in ((b, t) for b in range(2) for t in range(16 - k) if batch.loss_mask[b, t + k]):
            log_probabilities = logits_DBSV[k - 1, b, t].log_softmax(-1)
            values.append(-log_probabilities[labels_BS[b, t + k]].item())
            right[k, b, t] = bool(predicted_DBS[k - 1, b, t] == labels_BS[b, t + k])
            hits.append(right[k, b, t])
        losses.append(sum(values) / len(values))
        acceptance.append(sum(hits) / len(hits))
        supervised.append(len(values))
    lengths = [
        1 + right[1, b, t] + (right[1, b, t] and right[2, b, t])
        for b in range(2)
        for t in range(14)
        if batch.loss_mask[b, t] and batch.loss_mask[b, t + 1] and batch.loss_mask[b, t + 2]
    ]
    assert len(set(lengths)) == 3 and all(0 < rate < 1 for rate in acceptance)
    return Case(batch, losses, acceptance, supervised, sum(lengths) / len(lengths))


@torch.no_grad()
def heads_logits(model, batch) -> torch.Tensor:
    """[d, b, s, v] of every depth."""
    captured = []
    handle = model.mtp.register_forward_hook(lambda _module, _args, output: captured.append(output))
    with torch.enable_grad():
        model(batch.input_ids, batch.position_ids, None)
    handle.remove()
    MTPLossLoggingHelper.tracker.clear()
    depths_SBH = captured[0].chunk(3)[1:]
    return torch.stack([model.output_layer(part)[0].transpose(0, 1) for part in depths_SBH])


def train(model, batch):
    """One training forward and backward."""
    model(**batch.forward_kwargs()).sum().backward()


def agree(metrics, case: Case) -> None:
    """Counts exactly, losses as far as Megatron's float32 cross-entropy goes."""
    assert metrics.supervised_tokens == case.supervised
    assert metrics.acceptance == pytest.approx(case.acceptance, rel=1e-15)
    assert metrics.accepted_length == pytest.approx(case.accepted_length, rel=1e-15)
    assert metrics.losses == pytest.approx(case.losses, rel=1e-6)


@pytest.mark.parametrize("family", ["gpt", "hybrid"])
def test_a_model_reports_its_own_metrics_until_they_are_reset(world, family):
    case = predictable_case(family)
    model, other = (build_model(dataclasses.replace(SPEC, family=family)) for _ in range(2))
    train(model, case.batch)
    train(model, case.batch)
    kept = mtp_metrics(model, reset=False)
    assert kept.supervised_tokens == [2 * n for n in case.supervised]
    assert kept.acceptance == pytest.approx(case.acceptance)
    assert mtp_metrics(other).supervised_tokens == [0, 0]  # it did not train
    wrapped = torch.nn.ModuleDict({"vision": torch.nn.Linear(2, 2), "language": model})
    assert mtp_metrics([wrapped]).as_dict() == kept.as_dict()
    train(model, case.batch)
    agree(mtp_metrics(model), case)
    assert not [name for name in model.state_dict() if "metric" in name]


def test_forwards_that_train_no_heads_are_not_counted(world):
    case, model = predictable_case(), build_model(SPEC)
    kwargs = case.batch.forward_kwargs()
    with torch.no_grad():
        model(**kwargs)
    model(**kwargs, compute_mtp_loss=False)
    model.eval()(**kwargs)
    metrics = mtp_metrics(model)
    assert metrics.supervised_tokens == [0, 0] and metrics.accepted_length_positions == 0
    assert all(map(math.isnan, [*metrics.losses, *metrics.acceptance, metrics.accepted_length]))


def test_names_for_a_logger(world):
    case, model = predictable_case(), build_model(SPEC)
    train(model, case.batch)
    metrics = mtp_metrics(model)
    named = metrics.as_dict()
    assert set(named) == {
        *("mtp_accepted_length", "mtp_1_loss", "mtp_1_acceptance", "mtp_1_supervised_tokens"),
        *("mtp_2_loss", "mtp_2_acceptance", "mtp_2_supervised_tokens"),
    }
    assert named["mtp_2_loss"] == metrics.losses[1] and str(named) in repr(metrics)


def test_what_is_not_one_model_with_heads_is_refused(world):
    without = build_model(ModelSpec(mtp_num_layers=0))
    with pytest.raises(ValueError, match="with mtp_num_layers > 0, found none in GPTModel"):
        mtp_metrics(without)
    pair = torch.nn.ModuleList([build_model(SPEC), build_model(SPEC)])
    with pytest.raises(ValueError, match="reads one model, found 2 with a loss"):
        mtp_metrics(pair)


def metrics_of_two_ranks(case: Case):
    """The same batch over tensor-, context- and data-parallel ranks; stages without the loss."""
    for axis in ("tp", "cp", "dp", "dp, one rank idle"):
        with parallel_world(**({axis: 2} if axis in ("tp", "cp") else {})) as groups:
            batch, rank = case.batch, groups.dp_cp.rank()
            if axis == "cp":
                batch = cp_shard(batch, 2, rank)
            if axis == "dp":
                names = ("input_ids", "position_ids", "labels", "loss_mask")
                rows = {name: getattr(batch, name)[rank : rank + 1] for name in names}
                batch = dataclasses.replace(batch, **rows)
            model = build_model(SPEC)
            if axis != "dp, one rank idle" or rank == 0:
                train(model, batch)
            metrics, calls = count_collectives(mtp_metrics, model)
            assert calls == 1
            agree(metrics, case)
            if axis == "dp":
                train(model, batch)
                alone = mtp_metrics(model, group=groups.tp)
                assert alone.supervised_tokens[0] == int(batch.loss_mask[:, 1:].sum())
    with parallel_world(pp=2) as groups:
        metrics, calls = count_collectives(mtp_metrics, build_model(SPEC))
        if groups.pp.rank() == 0:
            assert metrics is None and calls == 0
        else:
            assert metrics.supervised_tokens == [0, 0] and calls == 1


def count_collectives(function, *args):
    """The result, and how often it reduced."""
    original, calls = torch.distributed.all_reduce, []

    def counted(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    torch.distributed.all_reduce = counted
    try:
        return function(*args), len(calls)
    finally:
        torch.distributed.all_reduce = original


def test_metrics_of_two_ranks_are_those_of_one():
    with parallel_world():
        case = predictable_case()
    run_ranks(metrics_of_two_ranks, 2, case)
