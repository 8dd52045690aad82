"""Every adapter is small, stands alone, and is on the page; frameworks are installed once.

Run: pytest tests/examples/test_integrations.py
"""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from tools import clients

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = sorted((ROOT / "examples" / "integrations").glob("mtp_*.py"))
PAGE = (ROOT / "docs" / "integrations.md").read_text()
FRAMEWORKS = {
    "mtp_areal": "areal",
    "mtp_megatron_bridge": "megatron",
    "mtp_nemo_rl": "nemo_rl",
    "mtp_slime": "slime",
    "mtp_verl": "verl",
}


def code_lines(source: str) -> set[int]:
    """Lines with code: no blank ones, comments or docstrings."""
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    texts = [node.body[0] for node in nodes if ast.get_docstring(node)]
    prose = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*silent, tokenize.ENDMARKER):
            found.update(range(token.start[0], token.end[0] + 1))
    return found - prose


def test_code_lines_counts_what_it_says():
    source = '"""Two.\n\nLines."""\n\n# one\na = 1  # two\n\ndef f():\n    "x"\n'
    assert code_lines(source) == {6, 8}


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapter_has_at_most_forty_lines_of_code(path):
    assert len(code_lines(path.read_text())) <= 40


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapter_imports_its_framework_torch_and_megatron_alone(path):
    allowed = {"torch", "megatron", FRAMEWORKS[path.stem], *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module]
        assert {name.partition(".")[0] for name in names} <= allowed


def test_every_framework_has_an_adapter_and_a_place_on_the_page():
    assert {path.stem for path in ADAPTERS} == set(FRAMEWORKS)
    for path in ADAPTERS:
        assert f"(../examples/integrations/{path.name})" in PAGE


def test_a_framework_that_is_there_is_not_installed_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(clients, "FOLDER", tmp_path)
    calls = []

    def pip(command, check):
        calls.append(command)
        folder = Path(command[command.index("--target") + 1])
        (folder / "megatron").mkdir()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(clients.subprocess, "run", pip)
    assert not clients.installed("miles")
    assert clients.main(["miles"]) == 0 and clients.main(["miles"]) == 0
    assert len(calls) == 1 and "miles-rl==0.0.2" in calls[0] and "--no-deps" in calls[0]
    assert clients.installed("miles") and not (tmp_path / "miles" / "megatron").exists()


@pytest.mark.parametrize("flags, status", [([], 1), (["--if-possible"], 0)])
def test_without_a_network_it_says_so_once_and_leaves_nothing_installed(
    tmp_path, monkeypatch, capsys, flags, status
):
    monkeypatch.setattr(clients, "FOLDER", tmp_path)

    def pip(command, check):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(clients.subprocess, "run", pip)
    assert clients.main(flags) == status
    assert "make clients" in capsys.readouterr().err
    assert not any(clients.installed(name) for name in clients.CLIENTS)


def test_an_unknown_framework_is_refused(capsys):
    with pytest.raises(SystemExit):
        clients.main(["trl"])
    assert "expected some of verl, areal, megatron-bridge, miles, got trl" in capsys.readouterr().err
