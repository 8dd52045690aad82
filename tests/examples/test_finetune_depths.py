"""Fine-tuning one layer as several draft steps.

    pytest tests/examples/test_finetune_depths.py
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.support import parallel_world, prepare, run_ranks

prepare()

from examples.finetune_mtp_head.batch import Batch
from examples.finetune_mtp_head.conversations import Sample
from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.report import read_metrics
from tests.examples.finetune_support import (
    build,
    data,
    differing,
    run,
    settings,
    tiny_model,
    whole_epoch,
)
from tests.examples.test_finetune_resume import continued, straight
from tests.tools.mtp_checkpoint.directories import digests
from tools.mtp_checkpoint.exporting import export_directory

DEPTHS = 2


@functools.cache
def epoch(ranks: int, expert_parallel_size: int) -> list[dict]:
    given = settings(depths=DEPTHS, expert_parallel_size=expert_parallel_size)
    return run_ranks(whole_epoch, ranks, given)[0]


def test_targets_of_a_later_depth_are_further_ahead_and_never_leave_the_row():
    sample = Sample(torch.arange(10, 15), torch.tensor([0, 0, 1, 1, 1]).bool(), "here")
    batch = Batch.of([sample], 0, depths=3)
    masks_DBS = [mask.tolist() for mask in batch.targets.masks_DBS]
    assert masks_DBS == [[[1, 1, 1, 0, 0, 0]], [[1, 1, 0, 0, 0, 0]], [[1, 0, 0, 0, 0, 0]]]
    labels = [batch.targets.labels_DBS[depth][0, 0].item() for depth in range(3)]
    assert labels == [12, 13, 14]


@pytest.mark.parametrize("ranks, size", [(2, 1), (2, 2)], ids=["two data ranks", "EP 2"])
def test_an_epoch_goes_the_same_way_however_samples_and_experts_are_spread(ranks, size):
    one, found = epoch(1, 1), epoch(ranks, size)
    for ours, theirs in zip(found, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["per_depth"] == pytest.approx(theirs["per_depth"], abs=2e-2)
        assert ours["targets"] == theirs["targets"]
    assert found[0]["loss"] == pytest.approx(one[0]["loss"], rel=5e-7)
    assert one[-1]["loss"] < one[0]["loss"]
    for record in one:
        losses = [record["per_depth"][f"depth_{depth}_loss"] for depth in (1, 2)]
        assert record["loss"] == pytest.approx(sum(losses) / 2, rel=1e-12)


def first_step(given) -> tuple:
    """On a rank: loss and gradients of the trainer's first step, and of plain autograd."""
    with parallel_world(seed=given.seed) as groups:
        trainer, loaded = build(given, groups)
        loss = sum(trainer.gradients(1).losses) / DEPTHS
        got = {n: p.main_grad.clone() for n, p in trainer.head.head.named_parameters()}
        batch = trainer._batch(trainer.sampler.batch(1), trainer.corpus.train)
        target = trainer.target
        hidden_BSH = target.hidden(batch.tokens_BS)
        inputs = (batch.tokens_BS, batch.positions_BS, hidden_BSH.transpose(0, 1), target.embed)
        wanted_loss = 0.0
        for k, states_SBH in enumerate(loaded.head(*inputs).chunk(DEPTHS), 1):
            # Token t + k + 1 of the same sample, if the assistant wrote it.
            rows, labels = [], []
            for b, index in enumerate(trainer.sampler.batch(1)):
                sample = trainer.corpus.train[index]
                for t in range(len(sample) - k - 1):
                    if sample.mask[t + k + 1]:
                        rows.append((t, b))
                        labels.append(int(sample.tokens[t + k + 1]))
            t_N, b_N = torch.tensor(rows).T
            logits_NV = trainer.objective.logits(states_SBH[t_N, b_N])
            wanted_loss = wanted_loss + F.cross_entropy(logits_NV, torch.tensor(labels)) / DEPTHS
        parameters = list(loaded.head.parameters())
        found = torch.autograd.grad(wanted_loss, parameters, materialize_grads=True)
        names = [name for name, _ in loaded.head.named_parameters()]
        return loss, got, wanted_loss.item(), dict(zip(names, found, strict=True))


def test_loss_and_gradients_are_those_of_the_mean_over_the_depths_written_out():
    loss, got, wanted_loss, wanted = run_ranks(first_step, 1, settings(depths=DEPTHS))[0]
    assert loss == pytest.approx(wanted_loss, rel=5e-7)
    for name, gradient in wanted.items():
        scale = max(gradient.abs().max().item(), 1e-8)
        assert (got[name] - gradient).abs().max().item() <= 5e-6 * scale, name


def wrong_chain(given) -> str:
    """On a rank: what is said of a head whose second depth reads other states than it should."""
    with parallel_world() as groups:
        trainer, loaded = build(given, groups)
        loaded.head.mtp.config.mtp_hidden_feedback = "pre-norm"  # the objective keeps its own copy
        try:
            trainer.step()
        except FinetuneError as error:
            return str(error)
    return ""


def test_a_depth_that_reads_other_states_than_the_engines_ends_the_run():
    said = run_ranks(wrong_chain, 1, settings(depths=DEPTHS))[0]
    assert "the head's 2 depths do not read the post-norm states of the depth before" in said


def evaluated(given) -> tuple:
    """On a rank: the example's evaluation, and the same counted position by position."""
    with parallel_world() as groups:
        trainer, loaded = build(given, groups)
        found = trainer.evaluate()
        target, lengths, accepted = trainer.target, [], [0, 0]
        for sample in trainer.corpus.held_out:
            batch = Batch.of([sample], trainer.corpus.pad_token, DEPTHS)
            hidden_BSH = target.hidden(batch.tokens_BS)
            own_S = target.greedy(hidden_BSH[0])
            states = loaded.head(
                batch.tokens_BS, batch.positions_BS, hidden_BSH.transpose(0, 1), target.embed
            ).chunk(DEPTHS)
            drafts = [trainer.objective.logits(x_SBH[:, 0]).argmax(-1) for x_SBH in states]
            for t in range(len(sample)):
                hits = [
                    bool(drafts[k - 1][t] == own_S[t + k])
                    for k in (1, 2)
                    if t + k + 1 < len(sample) and sample.mask[t + k + 1]
                ]
                accepted[0] += t + 2 < len(sample) and bool(sample.mask[t + 2]) and hits[0]
                if t + 3 < len(sample) and all(sample.mask[t + 1 : t + 4]):
                    lengths.append(1 + hits[0] + hits[0] * hits[1])
        return found, sum(lengths) / len(lengths), accepted[0]


def test_the_accepted_length_is_that_of_drafts_counted_one_by_one(tmp_path):
    """A head that has learnt a little of a model that has too, so that there are hits."""
    model, first = tiny_model(train_steps=120), tmp_path / "run"
    assert run(model, first, *data(), "--depths", 2, "--epochs", 6) == 0
    head = next((first / "checkpoints").glob("step-000030")) / "head"
    found, length, accepted = run_ranks(evaluated, 1, settings(model=model, head=head))[0]
    assert found.per_depth["accepted_length"] == pytest.approx(length, rel=1e-12)
    assert found.acceptance == pytest.approx(accepted / found.targets, rel=1e-12)
    assert 1.02 < length < 3
    # The run's own records say the same, and the loss of both depths has fallen.
    records = [r for r in read_metrics(first) if r["kind"] == "held_out"]
    for name in ("depth_1_loss", "depth_2_loss"):
        assert records[-1][name] < records[0][name] - 0.5
    assert records[-1]["accepted_length"] > records[0]["accepted_length"]


def test_a_resumed_run_continues_bit_for_bit_with_the_depths_of_its_checkpoint(tmp_path):
    given = settings(tmp_path, depths=DEPTHS, expert_parallel_size=2)
    found = zip(run_ranks(straight, 2, given), run_ranks(continued, 2, given))
    for one, other in found:
        assert other["next"][1] == one["next"][1]
        assert differing(other["end of the continued run"], one["end"][0]) == []
        assert other["end"][1] == one["end"][1] and "depth_2_loss" in one["end"][1].per_depth


def test_an_untrained_head_of_several_depths_is_exported_byte_for_byte(tmp_path):
    from tools.mtp_checkpoint.importing import import_directory

    import_directory(tiny_model(), tmp_path / "ckpt", depths=3)
    export_directory(tmp_path / "ckpt", tiny_model(), tmp_path / "same")
    assert digests(tiny_model()) == digests(tmp_path / "same")
