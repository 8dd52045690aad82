"""What the fine-tuning example refuses, with a clear error and without half a run.

    pytest tests/examples/test_finetune_refusals.py
"""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support import prepare

prepare()

from examples.finetune_mtp_head.options import parse
from examples.finetune_mtp_head.settings import Settings
from tests.examples.finetune_support import data, run, tiny_model

ROOT = Path(__file__).resolve().parents[2]


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
        return model
    shard = sorted(model.glob("*.safetensors"))[0]
    if how == "a shard gone":
        shard.unlink()
    elif how == "a shard cut off":
        shard.write_bytes(shard.read_bytes()[:-1000])
    elif how == "pickled":
        shard.rename(shard.with_name("pytorch_model-00001-of-00003.bin"))
    elif how == "no head":
        kept = {}
        for path in model.glob("*.safetensors"):
            kept |= {k: v for k, v in load_file(path).items() if not k.startswith("mtp.")}
            path.unlink()
        (model / "model.safetensors.index.json").unlink()
        save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no template", "has no chat template"),
        ("a shard gone", "model-00001-of-00003.safetensors"),
        ("a shard cut off", "model-00001-of-00003.safetensors"),
        ("pickled", ".bin"),
        ("no head", "mtp."),
    ],
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
        (["--export", "nowhere/exported"], "does not exist; make it first"),
        (["--export", "MODEL/exported"], "which is left untouched"),
        (["--output", "MODEL/out"], "which is left untouched"),
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
    arguments = [argument.replace("MODEL", str(tiny_model())) for argument in arguments]
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
