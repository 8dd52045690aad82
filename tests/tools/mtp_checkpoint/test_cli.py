"""The command line: help, exit statuses, what is printed, ranks from one command or torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.mtp_checkpoint.directories import copy_of, digests, set_config
from tools.mtp_checkpoint import cli

ROOT = Path(__file__).resolve().parents[3]
VERBS = ("inspect", "import", "verify", "export")


def run(capsys, *arguments):
    """Exit status, standard output and standard error of a call."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(capsys, verb):
    status, text, _ = run(capsys, verb, "--help")
    assert status == 0 and "Exit status" in text and "DIR" in text
    listed = run(capsys, "--help")[1]
    assert f"    {verb} " in listed


def test_help_waits_for_no_large_import():
    code = (
        "import sys; from tools.mtp_checkpoint import cli; cli.parser();"
        "print([n for n in ('torch', 'megatron.core', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_inspect_prints_the_head_and_ends_with_0(capsys, tiny):
    status, text, _ = run(capsys, "inspect", tiny())
    assert status == 0
    assert "qwen3_5_moe, layout per-expert" in text
    assert "mtp.layers.0.mlp.experts.*.up_proj.weight  x8" in text
    assert "41 tensors, 246,656 bytes" in text and "an import should succeed" in text
    assert "experts.5.up_proj" in run(capsys, "inspect", tiny(), "--full")[1]


def test_inspect_prints_problems_and_ends_with_1(capsys, tiny, tmp_path):
    directory = copy_of(tiny(), tmp_path / "copy")
    set_config(directory, attention_bias=True)
    status, text, _ = run(capsys, "inspect", directory)
    assert status == 1 and "problem: attention_bias is True, expected False" in text
    status, text, _ = run(capsys, "inspect", directory, "--json")
    found = json.loads(text)
    assert status == 1 and found["layout"] == "per-expert" and len(found["tensors"]) == 41
    assert found["tensors"]["mtp.norm.weight"]["shape"] == [64] and len(found["problems"]) == 1


def test_what_cannot_be_used_ends_with_2_and_a_line_that_says_why(capsys, tiny, tmp_path):
    out = tmp_path / "out"
    status, _, error = run(capsys, "import", tmp_path, "--out", out)
    assert status == 2 and error.startswith("error: ") and "has no config.json" in error
    arguments = ("import", tiny(), "--out", out, "--expert-parallel-size", 3)
    status, _, error = run(capsys, *arguments)
    assert status == 2 and "8 experts cannot be divided among 3 ranks" in error
    assert run(capsys, "import", tiny())[0] == 2  # argparse: --out is missing
    assert not out.exists()


def test_import_and_export_print_their_reports(capsys, tiny, tmp_path):
    ckpt, out, report = tmp_path / "ckpt", tmp_path / "out", tmp_path / "report.json"
    status, text, _ = run(capsys, "import", tiny(), "--out", ckpt, "--expert-parallel-size", 2)
    assert status == 0
    assert "per group [queries, gates, k, v]" in text and "x8" in text
    assert "rank 1: " in text and f"done: {ckpt}" in text
    status, text, _ = run(
        capsys, "export", ckpt, "--like", tiny(), "--out", out, "--report", report
    )
    assert status == 0 and "41 bit-identical, 0 changed" in text and "read and imported" in text
    assert {row["status"] for row in json.loads(report.read_text())["rows"]} == {"bit-identical"}
    assert digests(out) == digests(tiny())


def test_a_narrower_import_is_announced(capsys, tiny, tmp_path):
    source = tiny("qwen3_5_moe", "per-expert", "fp32")
    _, text, _ = run(capsys, "import", source, "--out", tmp_path / "ckpt", "--dtype", "bf16")
    assert "warning: the checkpoint is wider than bf16" in text


def test_ranks_of_torchrun_are_used_as_they_are(tiny, tmp_path):
    from tests.support import launch

    out = tmp_path / "out"
    arguments = ["import", tiny(), "--out", out, "--expert-parallel-size", 2]
    launch("tools.mtp_checkpoint", 2, arguments)
    report = json.loads((out / "import_report.json").read_text())
    assert report["expert_parallel_size"] == 2 and len(report["rows"]) == 41
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_another_number_of_ranks_than_torchruns_is_refused(capsys, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    arguments = ("import", tiny(), "--out", tmp_path / "out", "--expert-parallel-size", 2)
    status, _, error = run(capsys, *arguments)
    assert status == 2 and "--expert-parallel-size is 2 but there are 4 ranks" in error
    assert list(tmp_path.iterdir()) == []


def test_verbs_of_one_rank_refuse_torchruns_ranks(capsys, tiny, imported, tmp_path, monkeypatch):
    export = ("export", imported(), "--like", tiny(), "--out", tmp_path / "out")
    verify = ("verify", tiny(), imported())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for arguments in (export, verify):
        status, _, error = run(capsys, *arguments)
        assert status == 2 and "start it without torchrun" in error
        assert "--expert-parallel-size" not in error  # these verbs have no such option
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_is_refused_first(capsys, tiny, imported, tmp_path):
    export = ("export", imported(), "--like", tiny(), "--out", tmp_path / "out", "--report")
    for arguments in (export, ("verify", tiny(), imported(), "--json")):
        for report in (tmp_path / "missing" / "report.json", tmp_path):
            status, _, error = run(capsys, *arguments, report)
            assert status == 2 and f"{report}: expected the name of a file" in error
    assert list(tmp_path.iterdir()) == []
