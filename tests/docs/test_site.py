"""The site builds strictly, is whole, needs no network, and works in a browser.

Run: pytest tests/docs/test_site.py

The tests with a browser need Chromium and are skipped without it.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, prose
from tools.docs_site import browser, hooks
from tools.docs_site.__main__ import build_strictly

CONFIG = ROOT / "mkdocs.yml"
needs_browser = pytest.mark.skipif(browser.find() is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = build_strictly("--site-dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def navigation() -> list[str]:
    """The pages of the navigation, in order."""

    class Loader(yaml.SafeLoader):
        """Takes what MkDocs resolves itself for nothing."""

    Loader.add_multi_constructor("", lambda *_: None)

    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [leaf for value in values for leaf in leaves(value)]

    return leaves(yaml.load(CONFIG.read_text(), Loader)["nav"])


class Resources(HTMLParser):
    """What a page loads: everything but the targets of links."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.found += [values[key] for key in ("src", "srcset", "data", "poster") if key in values]
        if tag == "link":
            self.found.append(values["href"])


def test_every_page_of_the_navigation_is_there(site):
    assert len(navigation()) >= 18
    for page in navigation():
        assert (site / page).with_suffix(".html").is_file(), page


def test_every_page_of_the_repository_is_in_the_navigation():
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(hooks.READMES) >= 3
    assert pages | set(hooks.READMES.values()) <= set(navigation())


def test_the_first_page_links_to_every_page_and_example():
    linked = re.findall(r"\]\(([^)#]+)\)", prose(ROOT / "docs" / "index.md"))
    linked = {(ROOT / "docs" / target).resolve() for target in linked if "://" not in target}
    pages = {path.resolve() for path in PAGES if path.parent != ROOT}
    assert pages - linked == {ROOT / "docs" / "index.md"}


def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        for resource in Resources(page.read_text()).found:
            assert not re.match(r"(?:[a-z]+:)?//", resource), f"{page.name}: {resource}"
            if page.name != "404.html" and not resource.startswith("data:"):
                assert (page.parent / resource.split("?")[0]).exists(), f"{page.name}: {resource}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", sheet.read_text()), sheet


def test_the_reference_has_every_public_name_with_its_description(site):
    from megatron.core.transformer import mtp_objective

    text = (site / "api.html").read_text()
    for name in mtp_objective.__all__:
        assert f'id="megatron.core.transformer.mtp_objective.{name}"' in text, name
    for words in ("mtp_metrics", "accepted_length", "Denominator of the MTP loss"):
        assert words in text


def test_without_a_patched_tree_the_build_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_TREE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="expected a patched Megatron in .* `make docs`"):
        build_strictly()


def test_what_is_broken_fails_the_build(tmp_path):
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    (docs / "api.md").write_text("# API\n")  # reading all of Megatron takes most of the time
    (docs / "lonely.md").write_text("# In no navigation\n")
    with (docs / "index.md").open("a") as page:
        page.write("\n[a](nowhere.md) [b](concepts.md#nothing) [c](../tools/nothing.py)\n")
        page.write("\n![d](figures/none.svg)\n")
    config = CONFIG.read_text().replace("docs_dir: docs", f"docs_dir: {docs}")
    config = config.replace("hooks: [tools", f"hooks: [{ROOT}/tools")
    (tmp_path / "mkdocs.yml").write_text(config)
    options = ["-f", str(tmp_path / "mkdocs.yml"), "--site-dir", str(tmp_path / "site")]
    done = build_strictly(*options)
    assert done.returncode != 0
    # A warning is a line, and what is indented below it.
    warnings = "\n".join(re.findall(r"^WARNING.*(?:\n .*)*", done.stderr, flags=re.M))
    for wrong in ("nowhere.md", "#nothing", "nothing.py", "none.svg", "lonely.md"):
        assert wrong in warnings, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_work_in_the_repository_too(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    """The anchors that a repository's browser gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_links_of_a_page_are_rewritten_for_the_site():
    page = "[a](../../tests/conftest.py) [b](../../docs/ports.md#features) [c](run.py)\n"
    page += "```\n[d](run.py)\n```\n[e](none.py) [f](https://example.org/x)\n"
    assert hooks.rewrite(page, "examples/online_rl/README.md", "examples/online_rl.md") == (
        "a [b](../ports.md#features) c\n"
        "```\n[d](run.py)\n```\n[e](none.py) [f](https://example.org/x)\n"
    )
    assert hooks.rewrite("[g](../examples/online_rl)", "docs/x.md", "x.md") == (
        "[g](examples/online_rl.md)"
    )


@pytest.fixture(scope="module")
def address(site):
    """The site, served on this machine."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Says nothing."""

    def log_message(self, *_):
        pass


_FRAMES = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body><script>
for (const page of PAGES) {
  const frame = document.createElement("iframe")
  frame.style = "width:390px;height:800px"
  frame.onload = () => {
    const root = frame.contentDocument.documentElement
    const wide = root.scrollWidth > root.clientWidth ? " too wide" : ""
    document.body.append(Object.assign(document.createElement("p"),
      {textContent: page + wide + (root.querySelector("h1") ? "" : " empty")}))
  }
  frame.src = page
  document.body.append(frame)
}
</script>"""


@needs_browser
def test_all_pages_fit_a_narrow_screen_and_no_console_has_an_error(site, address):
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html"))
    pages.remove("404.html")  # its links are those of a server's root
    (site / "wide.htm").write_text('<!doctype html><div style="width: 1000px">wide</div>')
    (site / "frames.htm").write_text(_FRAMES.replace("PAGES", repr([*pages, "wide.htm"])))
    seen = browser.look(f"{address}/frames.htm")
    assert (seen.console, seen.asked) == ([], [])
    found = sorted(re.findall(r"<p>(.*?)</p>", seen.dom))
    assert found == [*pages, "wide.htm too wide empty"]  # the last shows that it would be seen


@needs_browser
def test_search_works_in_a_page_that_was_opened_as_a_file(site):
    seen = browser.look((site / "index.html").as_uri() + "?q=prediction_aligned_targets")
    assert (seen.console, seen.asked) == ([], [])
    assert re.search(r"\d+ matching documents", seen.dom)
    assert re.search(r'<a href="[^"]*api\.html[^"]*" class="md-search-result__link"', seen.dom)


@needs_browser
def test_what_a_page_does_wrong_is_seen(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<script src="https://cdn.example.org/x.js"></script><script>nothing()</script>'
    )
    seen = browser.look(page.as_uri())
    assert seen.asked == ["https://cdn.example.org/x.js"]
    assert len(seen.console) == 1 and "nothing is not defined" in seen.console[0]
