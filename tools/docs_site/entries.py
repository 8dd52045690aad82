"""The entries of the troubleshooting pages, and which message each explains.

An entry is an item of a list that begins with the messages it explains, as code, then a paragraph:

    - `hidden: expected a positive multiple of 8, got …`, `experts: expected …`

        What it means and what to do.

`…` stands for whatever is filled in, and for text left out. A message with backticks of its own has
two around it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tools.docs_site.messages import GAP, Message, squeeze

PAGES = "docs/troubleshooting*.md"
# So much of a message must be written out, unless it is this many letters anyway.
_SHARE, _ENOUGH = 0.4, 24


@dataclass(frozen=True)
class Entry:
    """One message as a page writes it, and where."""

    text: str
    where: str

    def explains(self, message: Message) -> bool:
        """Whether this is that message, with enough of its words to tell it from others."""
        pattern = ".*".join(map(re.escape, self.text.split(GAP)))
        if re.fullmatch(pattern, message.text) is None:
            return False
        written, all_of_it = (len(t.replace(GAP, "").replace(" ", "")) for t in (
            self.text, message.text
        ))  # fmt: skip
        return written >= min(_ENOUGH, _SHARE * all_of_it)


def entries_of(page: str, where: str) -> list[Entry]:
    """The entries of one page.

    Args:
        page: Markdown.
        where: what to call the file; the line number is added to it.
    """
    found = []
    for item in re.finditer(r"^- `.*(?:\n  \S.*)*", page, flags=re.M):
        line = page.count("\n", 0, item.start()) + 1
        for _, text in re.findall(r"(``?)(.+?)\1(?!`)", " ".join(item[0].split("\n"))):
            found.append(Entry(squeeze(text), f"{where}:{line}"))
    return found


def collect(root: Path) -> list[Entry]:
    """The entries of all pages.

    Args:
        root: the repository's top folder.
    """
    return [
        entry
        for page in sorted(root.glob(PAGES))
        for entry in entries_of(page.read_text(encoding="utf-8"), page.name)
    ]


def unexplained(messages: list[Message], entries: list[Entry]) -> list[Message]:
    """The messages without an entry."""
    return [m for m in messages if not any(entry.explains(m) for entry in entries)]


def stale(messages: list[Message], entries: list[Entry]) -> list[Entry]:
    """The entries that explain no message."""
    return [entry for entry in entries if not any(entry.explains(m) for m in messages)]


def stub(message: Message) -> str:
    """An entry to fill in."""
    ticks = "`` {} ``" if "`" in message.text else "`{}`"
    return f"- {ticks.format(message.text)}\n\n    What it means. What to do.\n"
