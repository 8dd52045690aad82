"""What MkDocs does differently here, see `hooks` in mkdocs.yml.

- READMEs of examples are pages too, and keep their place in the repository.
- A link to a file that is no page, such as a source file, becomes plain text: a built site has no
  repository beside it. A link to what does not exist stays, and fails the strict build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
READMES = {
    str(readme.relative_to(ROOT)): f"examples/{readme.parent.name}.md"
    for readme in sorted(ROOT.glob("examples/*/README.md"))
}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)


def on_files(files: Any, config: Any) -> Any:
    """Add the READMEs."""
    for source, target in READMES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    uri = page.file.src_uri
    place = next((source for source, target in READMES.items() if target == uri), f"docs/{uri}")
    return rewrite(markdown, place, uri)


def rewrite(markdown: str, place: str, uri: str) -> str:
    """Links as the site needs them.

    Args:
        markdown: the page.
        place: its path in the repository, which its links are relative to.
        uri: its path in the site.
    """
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_rewrite_text(markdown[end : fence.start()], place, uri), fence[0]]
        end = fence.end()
    return "".join([*parts, _rewrite_text(markdown[end:], place, uri)])


def _rewrite_text(text: str, place: str, uri: str) -> str:
    def link(match: re.Match) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(place), target))
        there = _page(path)
        if there is not None:
            return f"[{words}]({os.path.relpath(there, os.path.dirname(uri) or '.')}{anchor})"
        return words if (ROOT / path).exists() and not path.startswith("docs/") else match[0]

    return _LINK.sub(link, text)


def _page(path: str) -> str | None:
    """Where in the site a file of the repository is, if it is a page."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return READMES.get(path) or READMES.get(f"{path}/README.md")
