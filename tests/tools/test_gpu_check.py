"""The check for machines with a GPU is complete and fits its ten minutes; here only its dry run.

Run: pytest tests/tools/test_gpu_check.py
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def steps() -> dict[str, tuple[int, str]]:
    """{name: (seconds, command)}, as the dry run prints them."""
    said = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh"), "--dry-run"],
        check=True, capture_output=True, text=True, timeout=30,
    ).stdout
    found = re.findall(r"^([\w-]+): at most (\d+) s: (.*)$", said, flags=re.M)
    assert len(found) == len(said.splitlines())
    return {name: (int(seconds), command) for name, seconds, command in found}


def test_the_steps_end_within_ten_minutes(steps):
    assert sum(seconds for seconds, _ in steps.values()) <= 600


def test_every_file_of_a_step_exists(steps):
    files = [file for _, command in steps.values() for file in re.findall(r"tests/\S+", command)]
    assert len(files) > 5
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_two_ranks_share_the_gpu_for_context_parallelism(steps):
    _, command = steps["two-ranks-one-gpu"]
    assert command == "make test-dist ARGS=-k one_gpu"
    tests = (ROOT / "tests/functional_tests/mtp/test_context_parallel_parity.py").read_text()
    assert re.findall(r"^def (test_\w*one_gpu\w*)", tests, flags=re.M)


def test_imported_heads_of_transformer_engines_modules_are_verified(steps):
    _, command = steps["heads"]
    tests = (ROOT / re.search(r"tests/\S+", command)[0]).read_text()
    assert "has_transformer_engine()" in tests


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_says_what_the_check_does_and_runs_nothing(option):
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh"), option],
        check=True, capture_output=True, text=True, timeout=30,
    )
    assert done.stdout.startswith("What to run on a machine with one GPU")
    assert "set -euo" not in done.stdout and "==" not in done.stdout


def test_an_unknown_option_is_no_folder_for_logs():
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "gpu_check.sh"), "--dryrun"],
        capture_output=True, text=True, timeout=30,
    )
    assert done.returncode == 2 and "no option --dryrun" in done.stderr


def test_the_chunked_objective_is_among_the_steps(steps):
    _, command = steps["objective"]
    for name in ("chunk_logits", "chunked", "teacher_reference"):
        assert f"test_mtp_{name}.py" in command
