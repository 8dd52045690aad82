"""docs/ports.md tells every difference of every port, and git am applies each to its release.

Run: pytest tests/docs/test_ports_page.py
"""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from forklib import project, sdist  # noqa: E402
from forklib.errors import ForkError  # noqa: E402

PAGE = (ROOT / "docs" / "ports.md").read_text()
VERSIONS = project.port_versions(ROOT)


def row(name: str) -> list[str]:
    """The cells of a row of the first table, without its name."""
    (line,) = re.findall(rf"^\| {name} \|(.*)\|$", PAGE, flags=re.M)
    return [cell.strip() for cell in line.split("|")]


def test_each_port_has_a_column():
    assert row("apply with `git am`") == [
        "`patches/*`", *(f"`ports/{version}/patches/*`" for version in VERSIONS)
    ]  # fmt: skip


def test_the_numbers_of_patches_are_right():
    ports = [project.load(ROOT, version) for version in VERSIONS]
    of_series = [len(project.load(ROOT).patches), *(len(port.port.ported) for port in ports)]
    assert [int(cell) for cell in row("patches of the series")] == of_series
    own = [len(port.port.own) for port in ports]
    assert [int(cell or 0) for cell in row("patches of the port alone")] == [0, *own]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_port_lacks_and_what_only_it_has_is_told(version):
    port = project.load(ROOT, version).port
    for slug, reason in port.left_out.items():
        assert f"- {version} `{slug}`: {reason.split(':')[0]}" in PAGE.replace("`--help`", "--help")
    for slug in port.own:
        (versions,) = re.findall(rf"^- `{slug}` \((.*?)\):", PAGE, flags=re.M)
        assert version in versions.split(", ")


@pytest.mark.parametrize("version", VERSIONS)
def test_git_am_applies_a_port_to_its_release(version, tmp_path):
    port = project.load(ROOT, version)
    try:
        archive = sdist.obtain(port)
    except ForkError as reason:
        pytest.skip(str(reason))
    with tarfile.open(archive) as archive:
        archive.extractall(tmp_path, filter="data")
    (checkout,) = tmp_path.iterdir()
    git = ["git", "-c", "user.name=someone", "-c", "user.email=someone@example.invalid"]
    patches = sorted(str(patch) for patch in port.patches_dir.iterdir())
    for command in (
        ["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "-m", "the release"],
        ["am", "-q", *patches],
    ):  # fmt: skip
        subprocess.run([*git, *command], cwd=checkout, check=True)
    assert (checkout / "megatron/core/transformer/mtp_objective/options.py").is_file()
