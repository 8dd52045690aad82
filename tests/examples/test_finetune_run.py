"""The fine-tuning example from the command line: it learns, reports, resumes, exports, refuses.

    pytest tests/examples/test_finetune_run.py

Trains a tiny target for the head to imitate. About 45 seconds on one core.
"""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import launch, prepare

prepare()

from examples.finetune_mtp_head.__main__ import main
from examples.finetune_mtp_head.options import parse
from examples.finetune_mtp_head.report import read_metrics
from examples.finetune_mtp_head.settings import Settings
from tests.examples.finetune_support import conversations, tiny_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--batch-size 8 --micro-batch-size 4 --lr 1e-2 --min-lr 1e-3 --warmup-steps 2 --eval-every 2"
).split()


def data() -> list[str]:
    """A few of the bundled conversations."""
    train, held_out = conversations()
    return ["--data", str(train), "--held-out-data", str(held_out)]


def run(model: Path, output: Path, *arguments: object) -> int:
    """Run the example in this process; its ranks are forked."""
    return main(["--model", str(model), "--output", str(output), *SMALL, *map(str, arguments)])


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
    assert losses == sorted(losses, reverse=True)


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


def other_model(folder: Path) -> Path:
    """A head imported from a model of another width."""
    from tools.mtp_checkpoint.importing import import_directory
    from tools.tiny_checkpoint import make

    make(folder / "wide", dtype="fp32", hidden=32)
    import_directory(folder / "wide", folder / "head")
    return folder / "head"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_head_of_another_model_is_refused(tmp_path, capsys, ranks):
    head = other_model(tmp_path)
    assert run(tiny_model(), tmp_path / "out", *data(), "--head", head, "--ranks", ranks) == 2
    error = capsys.readouterr().err
    assert "is the head of another model" in error and "hidden_size 32 instead of 64" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "EMPTY"], "holds no *.jsonl file"),
        (["--data", "SILENT"], "has no assistant turn"),
        (["--max-length", "20"], "more than --max-length 20"),
        (["--head", "EMPTY"], "has no mtp_head.json"),
        (["--expert-parallel-size", "3", "--ranks", "3"], "choose a divisor of 8"),
        (["--held-out-data", "", "--held-out", "36"], "lower --held-out"),
    ],
)
def test_input_that_cannot_be_used_is_refused_with_status_2(tmp_path, capsys, arguments, message):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "SILENT").mkdir()
    line = json.dumps({"messages": [{"role": "user", "content": "Anybody there?"}]})
    (tmp_path / "SILENT" / "data.jsonl").write_text(line)
    given = [*data(), *(str(tmp_path / a) if a.isupper() else a for a in arguments)]
    if "" in given:  # hold out samples of the training data instead
        given = given[:2] + given[-2:]
    assert run(tiny_model(), tmp_path / "out", *given) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "out" / "checkpoints").exists()


def damaged(tmp_path: Path, how: str) -> Path:
    """A copy of the tiny model that cannot be used."""
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    if how == "no template":
        config = json.loads((model / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        (model / "chat_template.jinja").unlink(missing_ok=True)
    elif how == "a shard gone":
        sorted(model.glob("*.safetensors"))[0].unlink()
    return model


@pytest.mark.parametrize(
    ("how", "message"),
    [("no template", "has no chat template"), ("a shard gone", "safetensors")],
)
def test_a_model_that_cannot_be_used_is_refused(tmp_path, capsys, how, message):
    assert run(damaged(tmp_path, how), tmp_path / "out", *data()) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--ranks", "3", "--expert-parallel-size", "2"], "2 does not divide the 3 ranks"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--max-length", "2"], "max_length must be at least 3, got 2"),
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--lr", "0"], "expected 0 < lr"),
        (["--lr", "1e-6"], "min_lr"),
        (["--clip-grad", "0"], "inf does not clip"),
        (["--beta2", "1"], "beta2 must be in [0, 1)"),
        (["--weight-decay", "-1"], "weight_decay must not be negative"),
        (["--long-samples", "keep"], "invalid choice: 'keep'"),
        (["--resume"], "holds no run"),
        (["--export", "."], "exists; nothing is overwritten"),
        (["--output", __file__], "is a file"),
        (["--model", "."], "has no config.json"),
        (["--implementation", "te"], "transformer_engine is not installed"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    if "te" in arguments and importlib.util.find_spec("transformer_engine"):
        pytest.skip("Transformer Engine is installed")
    base = ["--model", str(tiny_model()), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as refusal:
        parse([*base, *arguments])
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_every_setting_has_an_option_with_its_own_default(tmp_path):
    options = parse(["--model", str(tiny_model()), "--output", str(tmp_path / "out")])
    assert options.settings == Settings(tiny_model(), tmp_path / "out")
    shown = subprocess.run(
        [sys.executable, "-m", "examples.finetune_mtp_head", "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    for field in dataclasses.fields(Settings):
        assert f"--{field.name.replace('_', '-')}" in shown.stdout
