"""What docs/mtp-heads.md says is true: its commands, its families, its example of a new one.

Run: pytest tests/docs/test_mtp_heads.py
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.device import prepare

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "mtp-heads.md").read_text()

prepare()


def block(language: str) -> str:
    """The page's one fenced block of a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.M | re.S)
    return found


def run(line: str) -> int:
    """Run a command of the page; modules of this repository in this process, which is faster."""
    words = shlex.split(line)
    if words[:2] != [".venv/bin/python", "-m"]:
        return subprocess.run(words).returncode
    module, arguments = words[2], words[3:]
    if module == "tools.tiny_checkpoint":
        from tools.tiny_checkpoint.__main__ import main
    else:
        assert module == "tools.mtp_checkpoint"
        from tools.mtp_checkpoint.cli import main
    return main(arguments)


@pytest.fixture
def environment(monkeypatch):
    """The command line hides GPUs from its process, and must not from this one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_every_command_of_the_walk_through_runs(tmp_path, environment, capfd):
    lines = block("sh").splitlines()
    assert len(lines) == 10
    for line in lines:
        assert run(line.replace("build/", f"{tmp_path}/")) == 0, line
        said = capfd.readouterr().out
        assert (said == "") == line.startswith("diff"), line


def test_the_table_of_families_is_complete():
    from tools.mtp_checkpoint.families import FAMILIES

    for family in FAMILIES:
        assert f"| `{family.model_types[0]}` | " in PAGE
        for layout in family.layouts:
            assert f"`{layout}`" in PAGE


def test_the_new_family_of_the_page_reads_a_checkpoint(tmp_path, monkeypatch):
    from tools.mtp_checkpoint import families
    from tools.mtp_checkpoint.inspecting import inspect_directory
    from tools.tiny_checkpoint import make

    directory = make(tmp_path / "tiny", layout="per-expert")
    config = directory / "config.json"
    config.write_text(config.read_text().replace("qwen3_5_moe", "qwen3_next"))
    assert inspect_directory(directory).family is None
    monkeypatch.setattr(families, "FAMILIES", list(families.FAMILIES))
    exec(block("python"), {})
    found = inspect_directory(directory)
    assert (found.family, found.layout, found.problems) == ("qwen3_next", "per-expert", ())


def test_links_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
