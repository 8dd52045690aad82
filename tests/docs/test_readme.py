"""What README.md says is true: its commands, its example, its links.

Run: pytest tests/docs/test_readme.py
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.device import prepare

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.M | re.S)


def test_the_commands_are_those_that_tests_run():
    # make test is what CI runs; the two demo tests below and in tests/examples run make demo's
    # module; git am and fork.py apply are run here and in tests/tools.
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    assert lines == ["make demo", "make test", "cd Megatron-LM", "git am /path/to/this/patches/*"]
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make test")


def test_make_help_lists_the_two_commands():
    text = subprocess.run(
        ["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    targets = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert {"demo", "test", "test-dist", "tree", "patches", "check", "rebase"} <= targets


def test_links_and_test_files_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    for name in re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py|tests/[\w/]+)`", README):
        assert list(ROOT.glob(name)) or list(ROOT.glob(f"tests/**/{name}")), name


def test_git_am_applies_the_series_to_the_base_release(tmp_path):
    tree = ROOT / "build" / "tree"
    if not (tree / ".git").is_dir():
        pytest.skip("build/tree is not there: MEGATRON_TREE names another checkout")
    checkout = tmp_path / "Megatron-LM"
    git = ["git", "-c", "user.name=someone", "-c", "user.email=someone@example.invalid"]
    subprocess.run(["git", "clone", "-q", str(tree), str(checkout)], check=True)
    base = subprocess.run(
        ["git", "rev-list", "--max-parents=0", "HEAD"],
        cwd=checkout, check=True, capture_output=True, text=True,
    ).stdout.strip()
    subprocess.run(["git", "checkout", "-q", base], cwd=checkout, check=True)
    patches = sorted(str(patch) for patch in (ROOT / "patches").iterdir())
    subprocess.run([*git, "am", "-q", *patches], cwd=checkout, check=True)
    assert (checkout / "megatron/core/transformer/mtp_objective/options.py").exists()
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=checkout, check=True, capture_output=True, text=True
    )
    assert status.stdout == ""


def test_the_example_trains_policy_and_heads_on_one_call():
    prepare()
    from tests.support.models import ModelSpec, build_model, is_mtp_param
    from tests.support.parallel import parallel_world

    def policy_loss(logits, labels, loss_mask):
        assert logits.shape == (2, 8, 64)
        logprobs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
        return -(logprobs.squeeze(-1) * loss_mask).sum()

    (example,) = blocks("python")
    with parallel_world():
        model = build_model(ModelSpec())
        names = dict(
            model=model,
            policy_loss=policy_loss,
            tokens=torch.arange(16).view(2, 8),
            sampled=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0]] * 2),
            position_ids=torch.arange(8).expand(2, 8),
            attention_mask=None,
        )
        exec(compile(example, "README.md", "exec"), names)
        assert names["loss"].item() > 0
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        assert any(is_mtp_param(name) for name, _ in model.named_parameters())


def test_patches_hold_nothing_but_patches():
    names = sorted(os.listdir(ROOT / "patches"))
    assert names and all(re.fullmatch(r"\d{4}-[a-z0-9-]+\.patch", name) for name in names)
