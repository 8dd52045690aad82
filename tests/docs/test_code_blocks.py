"""Code on the pages: Python that is marked runs, the rest parses; commands and options exist.

Run: pytest tests/docs/test_code_blocks.py

A Python block below a line `<!-- runs -->` is executed, after the blocks above it on its page, in a
world of one rank with a tiny isolated model. It finds what a trainer has: see `names_of_a_trainer`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import shlex
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from tests.docs.pages import PAGES, ROOT, all_blocks, blocks, prose
from tests.support.device import device, prepare

prepare()

from tests.support.models import ModelSpec, build_model  # noqa: E402
from tests.support.parallel import parallel_world  # noqa: E402

# What a reader's machine has, or what the page asks to type in another place.
PROGRAMS = {"git", "cd", "diff", "tensorboard", "$EDITOR", "export"}
_INDENTED = re.compile(
    r"^    ((?:make|python|\.venv/bin/python|PYTHONPATH=)[ .](?:.*\\\n)*.*)", re.M
)
PYTHON = [block for block in all_blocks("python")]
RUNNING = [page for page in PAGES if any(block.runs for block in blocks(page))]


def name(block) -> str:
    return f"{block.page}:{block.line}"


def names_of_a_trainer() -> dict:
    """What a runnable block may use without defining it."""
    model = build_model(ModelSpec(overrides=dict(mtp_isolated_loss=True)))
    tokens = torch.arange(16, device=device()).view(2, 8)

    def policy_loss(logits, labels, loss_mask):
        assert logits.shape == (2, 8, 64)
        logprobs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
        return -(logprobs.squeeze(-1) * loss_mask).sum()

    labels = tokens.roll(-1, 1).masked_fill(tokens % 8 == 7, -100)
    microbatch = SimpleNamespace(labels=labels, loss_mask=None, packed_seq_params=None)
    return dict(
        model=model,
        config=model.config,
        microbatches=[microbatch],
        cp_group=None,
        dp_cp_group=None,
        R=1,
        step=1,
        logger=SimpleNamespace(log=print),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        policy_loss=policy_loss,
        tokens=tokens,
        sampled=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0]] * 2, device=device()),
        position_ids=torch.arange(8, device=device()).expand(2, 8),
        attention_mask=None,
    )


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.name)
def test_blocks_that_are_marked_run(page):
    with parallel_world():
        names = names_of_a_trainer()
        for block in blocks(page):
            if block.language == "python" and block.runs:
                exec(compile(block.text, name(block), "exec"), names)


def test_the_step_of_the_quickstart_trains_policy_and_heads(capsys):
    (block,) = [b for b in blocks(ROOT / "docs" / "quickstart.md") if b.language == "python"]
    assert block.runs
    with parallel_world():
        names = names_of_a_trainer()
        before = {key: value.clone() for key, value in names["model"].named_parameters()}
        exec(compile(block.text, name(block), "exec"), names)
        for key, value in names["model"].named_parameters():
            assert not torch.equal(value, before[key]), key
    said = ast.literal_eval(capsys.readouterr().out)
    assert said["mtp_1_supervised_tokens"] == 8 and 1 <= said["mtp_accepted_length"] <= 3


@pytest.mark.parametrize("block", PYTHON, ids=name)
def test_python_parses(block):
    ast.parse(block.text.replace("…", "..."))


def commands() -> list[tuple[str, str]]:
    """(place, command) of all shell blocks, indented commands and `make …` in the text."""
    texts = [(name(block), block.text) for block in all_blocks("sh")]
    for page in PAGES:
        place, text = str(page.relative_to(ROOT)), prose(page)
        texts += [(place, found) for found in _INDENTED.findall(text)]
        texts += [(place, found) for found in re.findall(r"`(make [^`]*)`", text)]
    found = []
    for place, text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            line = re.sub(r"(^|\s)#.*", "", line).strip()
            found += [(place, part.strip()) for part in line.split("&&") if part.strip()]
    return list(dict.fromkeys(found))


@cache
def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z-]+):", text, flags=re.M))


@cache
def help_of(module: str, verb: str = "") -> str:
    """What `--help` of a module of this repository, or of a verb of it, prints."""
    said = io.StringIO()
    arguments = [module, *filter(None, [verb]), "--help"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as end:
            if module.endswith(".py"):
                patch.syspath_prepend(str((ROOT / module).parent))
                runpy.run_path(str(ROOT / module), run_name="__main__")
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert end.value.code == 0, f"{' '.join(arguments)} ended with {end.value.code}"
    return said.getvalue()


def check(words: list[str]) -> None:
    """One command: its program, module, verb and options exist."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]  # a variable for this command
    program = words[0] if words else "export"
    if program == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert targets and set(targets) <= make_targets(), targets
    elif program.endswith(("python", "python3.12")) or program == "torchrun":
        module = re.search(r"(?:^| )-m (\S+)(.*)", " ".join(words[1:]))
        script = re.search(r"(?:^| )(\S+\.py)(.*)", " ".join(words[1:]))
        target, rest = (module or script).groups()
        if target != "pip":
            check_options(target, shlex.split(rest))
    elif program.startswith("--"):
        pass  # flags of Megatron's trainer, which test_flags.py looks up
    else:
        assert program in PROGRAMS, f"unknown program {program}"


def check_options(module: str, words: list[str]) -> None:
    verb = words[0] if words and re.fullmatch(r"[a-z]+", words[0]) else ""
    help_text = help_of(module, verb)
    for option in (word.split("=")[0] for word in words if word.startswith("--")):
        assert re.search(rf"{option}(?![\w-])", help_text), f"{module} {verb} has no {option}"


@pytest.mark.parametrize(("place", "command"), commands())
def test_commands_and_their_options_exist(place, command):
    check(shlex.split(command))


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "python -m tools.tiny_checkpoint --colour red",
        ".venv/bin/python -m tools.mtp_checkpoint import a --layouts b",
        "python tools/fork.py paint",
        "frobnicate",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(shlex.split(command))
