"""The pages of documentation, their code blocks and their links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
RUNS = "<!-- runs -->"


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        page: path in the repository.
        line: of the opening fence.
        language: of the fence, "" if it names none.
        text: what stands in it, without the fence's indentation.
        runs: whether the line before says that tests execute it.
    """

    page: str
    line: int
    language: str
    text: str
    runs: bool


def blocks(page: Path) -> list[Block]:
    """The fenced code blocks of a page, in order."""
    found, lines = [], page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        fence = re.fullmatch(r"( *)```([\w-]*)", line)
        if fence is None:
            continue
        if start is None:
            start, indent, language = number, len(fence[1]), fence[2]
        else:
            text = "\n".join(inner[indent:] for inner in lines[start + 1 : number])
            runs = start > 0 and lines[start - 1].strip() == RUNS
            place = str(page.relative_to(ROOT))
            found.append(Block(place, start + 1, language, text + "\n", runs))
            start = None
    assert start is None, f"{page}: the fence of line {start + 1} is not closed"
    return found


def all_blocks(language: str) -> list[Block]:
    """The blocks of one language on all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
