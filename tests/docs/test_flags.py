"""docs/flags.md says what the code says: fields, flags, arguments, defaults, targets.

Run: pytest tests/docs/test_flags.py
"""

import argparse
import ast
import dataclasses
import inspect
import re

import pytest

from tests.docs.pages import PAGES, ROOT
from tests.support.device import prepare

prepare()

from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402
from tests.support.release import hybrid_model  # noqa: E402

PAGE = (ROOT / "docs" / "flags.md").read_text()
PATCHES = sorted((ROOT / "patches").glob("*.patch"))


def table(heading: str) -> dict[str, list[str]]:
    """{name: the other cells} of the first table below a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.*?)` \| (.*) \|$", section.split("\n\nWhat comes")[0], flags=re.M)
    return {name: [cell.strip("` ") for cell in rest.split(" | ")] for name, rest in rows}


def added_lines(path: str) -> str:
    """What all patches add to one of upstream's files."""
    found = []
    for patch in PATCHES:
        for file in re.split(r"^diff --git ", patch.read_text(), flags=re.M)[1:]:
            if file.startswith(f"a/{path} "):
                found += re.findall(r"^\+(?!\+\+)(.*)", file, flags=re.M)
    return "\n".join(found)


@pytest.fixture(scope="module")
def parser():
    parser = argparse.ArgumentParser()
    add_megatron_arguments(parser)
    return parser


def test_the_table_has_every_field_that_the_series_adds():
    added = added_lines("megatron/core/transformer/transformer_config.py")
    fields = set(re.findall(r"^    (\w+): .* = ", added, flags=re.M))
    assert fields == set(table("Config fields that the series adds"))


@pytest.mark.parametrize(
    "heading", ["Config fields that the series adds", "Upstream's fields that matter here"]
)
def test_fields_flags_and_defaults_are_those_of_the_code(parser, heading):
    fields = {field.name: field for field in dataclasses.fields(TransformerConfig)}
    flags = {flag: action for action in parser._actions for flag in action.option_strings}
    rows = table(heading)
    assert rows
    for name, (flag, default, *_) in rows.items():
        assert fields[name].default == ast.literal_eval(default), name
        assert flags[flag].dest == name


@pytest.mark.parametrize("of", ["gpt", "hybrid", "schedule"])
def test_arguments_of_forward_are_those_of_the_code(of):
    function = {
        "gpt": GPTModel.forward,
        "hybrid": hybrid_model().forward,
        "schedule": GPTModel.build_schedule_plan,
    }[of]
    parameters = inspect.signature(function).parameters
    rows = table("Arguments of forward")
    added = added_lines("megatron/core/models/gpt/gpt_model.py")
    named = set(re.findall(r"^        (\w+): [^=]+ = [\w.]+,$", added, flags=re.M))
    assert named & set(parameters) == set(rows)
    for name, (default, *_) in rows.items():
        assert parameters[name].default == ast.literal_eval(default), name
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_variables_are_read_somewhere():
    sources = [ROOT / "Makefile", ROOT / "setup.py", *(ROOT / "tools").rglob("*.*")]
    sources += [*(ROOT / "tests").rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources if path.suffix in ("", ".py", ".sh"))
    for heading in ("Make targets", "Environment variables"):
        for name in table(heading):
            assert re.search(rf"\b{name}\b", text), name


def test_every_flag_of_megatron_that_a_page_names_exists(parser):
    known = {flag for action in parser._actions for flag in action.option_strings}
    for page in PAGES:
        for flag in re.findall(r"--(?:no-)?mtp-[\w-]+|--dist-ckpt-[\w-]+", page.read_text()):
            assert flag in known, f"{page.name}: {flag}"
