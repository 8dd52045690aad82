"""Fine-tuning of an MTP head: what a checkpoint brings back, and what a resume refuses.

    pytest tests/examples/test_finetune_resume.py
"""

import dataclasses
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

from tests.support import parallel_world, prepare, run_ranks

prepare()

from examples.finetune_mtp_head import checkpoints
from examples.finetune_mtp_head.checkpoints import read_training
from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.loading import fingerprint
from examples.finetune_mtp_head.report import Report, read_metrics
from tests.examples.finetune_support import build, differing, settings, state_of

MIDDLE, END = 3, 5  # steps of an epoch of five


def straight(given) -> dict:
    """On a rank: one epoch with checkpoints in the middle and at the end; what it went through."""
    seen = {}
    with parallel_world(ep=given.expert_parallel_size, seed=given.seed) as groups:
        trainer, loaded = build(given, groups)
        checksum = fingerprint(trainer.corpus)
        torch.rand(5)  # the generators are no longer as they were seeded
        while trainer.steps_done < END:
            record = trainer.step()
            if trainer.steps_done == MIDDLE:
                checkpoints.save(trainer, loaded.manifest, checksum)
            if trainer.steps_done == MIDDLE + 1:
                seen["next"] = state_of(trainer), (record.loss, record.grad_norm, record.lr)
        checkpoints.save(trainer, loaded.manifest, checksum)
        seen["end"] = state_of(trainer), trainer.evaluate()
    return seen


def continued(given) -> dict:
    """On a rank: the same from the two checkpoints, each in a world of other seeds."""
    seen = {}
    for step, name in ((MIDDLE, "next"), (END, "end")):
        checkpoint = given.output / "checkpoints" / f"step-{step:06d}"
        with parallel_world(ep=given.expert_parallel_size, seed=99) as groups:
            trainer, _ = build(given, groups, checkpoint=checkpoint)
            assert trainer.steps_done == step
            if name == "end":
                seen[name] = state_of(trainer), trainer.evaluate()
                continue
            record = trainer.step()
            seen[name] = state_of(trainer), (record.loss, record.grad_norm, record.lr)
            while trainer.steps_done < END:  # the last one asserts that each sample came once
                trainer.step()
            seen["end of the continued run"] = state_of(trainer)
    return seen


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def runs(request, tmp_path_factory):
    """Both runs on two expert-parallel ranks: [(straight, continued) of each rank], the folder."""
    output = tmp_path_factory.mktemp("run")
    given = settings(output, expert_parallel_size=2, dtype=request.param)
    return list(zip(run_ranks(straight, 2, given), run_ranks(continued, 2, given))), given


def test_the_step_after_a_resume_is_bit_for_bit_the_one_without(runs):
    for one, other in runs[0]:
        assert other["next"][1] == one["next"][1]  # loss, gradient norm, learning rate
        assert differing(other["next"][0], one["next"][0]) == []


def test_a_continued_epoch_ends_bit_for_bit_as_the_straight_one(runs):
    for one, other in runs[0]:
        assert differing(other["end of the continued run"], one["end"][0]) == []


def test_the_checkpoint_at_the_end_brings_back_parameters_adam_generators_and_held_out_loss(runs):
    for one, other in runs[0]:
        assert differing(other["end"][0], one["end"][0]) == []
        assert other["end"][1] == one["end"][1]
        kinds = {name.split("/")[0] for name in one["end"][0]}
        assert kinds == {"parameter", "master", "adam", "generator"}


def test_steps_change_what_is_compared(runs):
    """Else the comparisons above would show nothing."""
    one, _ = runs[0][0]
    changed = differing(one["next"][0], one["end"][0])
    assert {name.split("/")[0] for name in changed} == {"parameter", "master", "adam"}


def test_a_checkpoint_holds_a_head_that_the_import_tool_reads_and_nothing_unfinished(runs):
    folder = runs[1].output / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000003", "step-000005"]
    manifest = json.loads((folder / "step-000005" / "head" / "mtp_head.json").read_text())
    assert manifest["family"] == "qwen3_5_moe" and manifest["dtype"] == runs[1].dtype


def resume_with(given, checkpoint: Path, lose: str | None = None) -> list[str]:
    """On a rank: the error of a resume, or none."""
    with parallel_world(ep=given.expert_parallel_size) as groups:
        try:
            trainer, _ = build(given, groups, checkpoint=checkpoint)
            if lose == "counts":
                trainer.seen.restore(torch.zeros(len(trainer.corpus.train), dtype=torch.int64))
            while trainer.steps_done < END:
                trainer.step()
        except FinetuneError as error:
            return [str(error)]
    return []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The settings of a run on one rank with checkpoints at steps 3 and 5."""
    given = settings(tmp_path_factory.mktemp("run"))
    run_ranks(straight, 1, given)
    return given


def middle(given) -> Path:
    return given.output / "checkpoints" / "step-000003"


@pytest.mark.parametrize(
    ("changed", "ranks", "message"),
    [
        ({"lr": 2e-2}, 1, "settings of the run it continues: lr was 0.01 and is 0.02"),
        ({}, 2, "was written by 1 ranks, this run has 2"),
    ],
)
def test_a_resume_that_would_not_be_the_same_run_is_refused(saved, changed, ranks, message):
    given = dataclasses.replace(saved, **changed)
    [error] = run_ranks(resume_with, ranks, given, middle(saved))[0]
    assert message in error


def test_a_resume_with_other_data_is_refused(saved, tmp_path):
    other = shutil.copytree(middle(saved), tmp_path / "step-000003")
    training = read_training(other)
    (other / "training.json").write_text(json.dumps({**training, "fingerprint": "of other data"}))
    [error] = run_ranks(resume_with, 1, saved, other)[0]
    assert "the samples are not those" in error and "--head" in error


def test_an_epoch_continued_without_what_it_has_seen_fails_its_count(saved):
    assert run_ranks(resume_with, 1, saved, middle(saved))[0] == []
    [error] = run_ranks(resume_with, 1, saved, middle(saved), "counts")[0]
    assert "24 were missed" in error


def test_a_checkpoint_without_its_last_file_does_not_count(saved, tmp_path):
    shutil.copytree(saved.output / "checkpoints", tmp_path / "checkpoints")
    assert checkpoints.latest(tmp_path).name == "step-000005"
    (tmp_path / "checkpoints" / "step-000005" / "training.json").unlink()
    assert checkpoints.latest(tmp_path).name == "step-000003"
    shutil.rmtree(tmp_path / "checkpoints" / "step-000003")
    with pytest.raises(FinetuneError, match="no complete checkpoint"):
        checkpoints.latest(tmp_path)


def save_on_a_full_disk(given) -> list[str]:
    """On a rank: save while no file can grow beyond 20 kB, and then again."""
    folder = given.output / "checkpoints"
    with parallel_world() as groups:
        trainer, loaded = build(given, groups)
        trainer.step()
        limits, found = resource.getrlimit(resource.RLIMIT_FSIZE), []
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            checkpoints.save(trainer, loaded.manifest, "")
        except FinetuneError as error:
            found.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        found += [path.name for path in folder.iterdir()]
        (folder / ".step-000009.run.partial").mkdir()  # of a run that was killed
        checkpoints.save(trainer, loaded.manifest, "")
        return found + [path.name for path in folder.iterdir()]


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    [(error, *left)] = run_ranks(save_on_a_full_disk, 1, settings(tmp_path))
    assert "step-000001 cannot be written" in error and "OSError" in error
    assert left == ["step-000001"]  # nothing before the second attempt


def prune(given) -> list[str]:
    """On a rank: a checkpoint after each of three steps, two to keep."""
    with parallel_world() as groups:
        trainer, loaded = build(given, groups)
        for _ in range(3):
            trainer.step()
            checkpoints.save(trainer, loaded.manifest, "")
        return sorted(path.name for path in (given.output / "checkpoints").iterdir())


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    given = settings(tmp_path, keep_checkpoints=2)
    assert run_ranks(prune, 1, given)[0] == ["step-000002", "step-000003"]


def test_metrics_of_steps_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    first = Report(tmp_path, True, total=3)
    for step in (1, 2, 3):
        first.add("train", step, loss=float(step), accuracy=0.0)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # the run was killed while it wrote
    again = Report(tmp_path, True, total=3, done=1)
    again.add("train", 2, loss=9.0, accuracy=0.0)
    again.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(1, 1.0), (2, 9.0)]
