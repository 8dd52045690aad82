"""The fine-tuning example from the command line: it learns, reports, resumes, exports.

    pytest tests/examples/test_finetune_run.py

Trains a tiny target for the head to imitate. About 45 seconds on one core.
"""

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.support import launch, prepare

prepare()

from examples.finetune_mtp_head.report import read_metrics
from tests.examples.finetune_support import conversations, data, run, tiny_model


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """One epoch over bundled conversations on two ranks, exported; the head of a trained target."""
    folder = tmp_path_factory.mktemp("trained")
    model = tiny_model(train_steps=120)
    train, held_out = conversations(train=320, held_out=24)
    arguments = ["--data", train, "--held-out-data", held_out, "--expert-parallel-size", 2]
    arguments += ["--ranks", 2, "--eval-every", 8, "--export", folder / "exported"]
    assert run(model, folder / "run", *arguments) == 0
    return folder


def held_out(folder: Path) -> list[dict]:
    return [record for record in read_metrics(folder) if record["kind"] == "held_out"]


def test_the_loss_on_held_out_text_falls_and_the_frozen_model_accepts_more_drafts(trained):
    records = held_out(trained / "run")
    assert [record["step"] for record in records] == [0, 8, 16, 24, 32, 40]
    first, last = records[0], records[-1]
    assert last["loss"] < first["loss"] - 1.0
    assert last["acceptance"] > first["acceptance"] + 0.1
    assert last["targets"] == first["targets"] > 1000
    losses = [record["loss"] for record in records]
    assert losses[-1] == min(losses)


def test_every_step_has_a_line_and_tensorboard_the_same_numbers(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = [r for r in read_metrics(trained / "run") if r["kind"] == "train"]
    assert [record["step"] for record in records] == list(range(1, 41))
    for record in records:
        assert record["grad_norm"] > 0 and record["targets"] > 0 and record["samples"] == 8
    events = EventAccumulator(str(trained / "run" / "tensorboard")).Reload()
    for kind, name in (("train", "loss"), ("held_out", "loss"), ("held_out", "acceptance")):
        wanted = [(r["step"], r[name]) for r in read_metrics(trained / "run") if r["kind"] == kind]
        found = [(event.step, event.value) for event in events.Scalars(f"{kind}/{name}")]
        assert [step for step, _ in found] == [step for step, _ in wanted]
        assert [v for _, v in found] == pytest.approx([v for _, v in wanted], rel=1e-6)


def test_the_plot_is_there_and_nothing_unfinished(trained):
    assert (trained / "run" / "finetune.png").read_bytes().startswith(b"\x89PNG\r\n")
    names = {path.name for path in (trained / "run").iterdir()}
    assert names == {"checkpoints", "finetune.png", "metrics.jsonl", "tensorboard"}


def test_the_exported_model_has_the_trained_head_and_everything_else_unchanged(trained):
    before, after = weights(tiny_model(train_steps=120)), weights(trained / "exported")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("mtp.")}
    assert (trained / "exported" / "tokenizer.json").is_file()


def test_a_run_can_start_from_a_head_that_another_run_trained(trained, tmp_path):
    model, head = tiny_model(train_steps=120), trained / "run/checkpoints/step-000040/head"
    assert run(model, tmp_path / "next", *data(), "--head", head, "--held-out", 24) == 0
    again = held_out(tmp_path / "next")
    assert again[0]["loss"] < held_out(trained / "run")[0]["loss"] - 1.0


def test_a_stopped_run_continues_to_the_same_end(tmp_path, capsys):
    model, straight, stopped = tiny_model(), tmp_path / "straight", tmp_path / "stopped"
    common = [*data(), "--checkpoint-every", 3, "--keep-checkpoints", 0]
    assert run(model, straight, *common) == 0
    shutil.copytree(straight, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-000005")
    with pytest.raises(SystemExit) as refusal:
        run(model, stopped, *common)
    assert refusal.value.code == 2
    assert "continue it with --resume" in capsys.readouterr().err
    assert run(model, stopped, *common, "--resume") == 0
    exact = [
        [{k: v for k, v in record.items() if k != "seconds"} for record in read_metrics(folder)]
        for folder in (straight, stopped)
    ]
    assert exact[0] == exact[1] and exact[0][-1]["step"] == 5


def test_preflight_prints_its_list_and_passes(tmp_path, capfd):
    arguments = [*data(), "--preflight", "--ranks", 2, "--expert-parallel-size", 2]
    assert run(tiny_model(), tmp_path / "out", *arguments) == 0
    printed = capfd.readouterr().out
    assert len(re.findall(r"^\[  ok   \] ", printed, re.MULTILINE)) == 8
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_preflight_that_fails_has_status_1(tmp_path, capfd):
    arguments = [*data(), "--preflight", "--lr", 1e-30, "--min-lr", 0]
    assert run(tiny_model(), tmp_path / "out", *arguments) == 1
    assert "[FAILED ] update applied: rank 0:" in capfd.readouterr().out


def test_torchrun_starts_the_same_preflight(tmp_path):
    arguments = ["--model", tiny_model(), "--output", tmp_path / "out", *data(), "--preflight"]
    launch("examples.finetune_mtp_head", 2, [*arguments, "--expert-parallel-size", 2])
