"""A page in headless Chromium: its picture, its text, and what it says on the console."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--enable-logging=stderr",
    "--log-level=0",
    "--virtual-time-budget=6000",
    # No name but this machine's resolves: nothing leaves it.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)
_REQUEST = re.compile(r'"initiator":"([^"]*)".*?"url":"(https?://[^"]*)"')
_LOCAL = re.compile(r"https?://(?:localhost|127\.0\.0\.1)[:/]")
_CONSOLE = re.compile(r'CONSOLE(?::\d+|\(\d+\))\] "(.*)", source: (.*)')
DESKTOP, MOBILE = (1280, 900), (500, 900)


@dataclass(frozen=True)
class Seen:
    """What a page did.

    Attributes:
        dom: the document after its scripts ran.
        console: what scripts have written or thrown.
        asked: what was requested from other machines, in vain.
    """

    dom: str
    console: list[str]
    asked: list[str]


def find() -> str | None:
    """Chromium's path, None if there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def look(url: str, picture: Path | None = None, size: tuple[int, int] = DESKTOP) -> Seen:
    """Open a page, without a network.

    Args:
        url: file:// or http:// of this machine.
        picture: PNG to write.
        size: width and height of the window; Chromium makes it no narrower than 500.

    Raises:
        FileNotFoundError: there is no Chromium.
        subprocess.CalledProcessError, subprocess.TimeoutExpired: it fails or hangs.
    """
    program = find()
    if program is None:
        raise FileNotFoundError(f"expected one of {', '.join(_NAMES)} on the path, found none")
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        arguments = [f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        log = Path(profile) / "requests.json"
        arguments.append(f"--log-net-log={log}")
        wanted = ["--dump-dom"] if picture is None else [f"--screenshot={picture}"]
        done = subprocess.run(
            [program, *_OPTIONS, *arguments, *wanted, url],
            check=True, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        requests = _REQUEST.findall(log.read_text(encoding="utf-8", errors="replace"))
    # The browser's own requests have no page that they came from.
    asked = {url for page, url in requests if page != "not an origin" and not _LOCAL.match(url)}
    console = [" ".join(found) for found in _CONSOLE.findall(done.stderr)]
    return Seen(done.stdout, console, sorted(asked))
