"""A browser for tests of the live page: the system's chromium, through playwright, with all that it did noted."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: apt-get install chromium")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
AXE = Path(__file__).parent / "axe.min.js"


@dataclass
class Visit:
    """A page that was opened, and what it asked for and complained about."""

    page: Any
    urls: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def check(self, host: str) -> None:
        """Whether nothing went wrong, and nothing was asked of another server."""
        assert self.complaints == []
        assert {urlsplit(url).netloc for url in self.urls if not url.startswith(("blob:", "data:"))} == {host}

    def known(self, script: str) -> Any:
        """What the page knows: a JavaScript expression about `chairlift`."""
        known = "const { player, histories } = window.chairlift ?? { histories: [] };"
        return self.page.evaluate(f"(() => {{ {known} return {script}; }})()")

    def until(self, script: str, seconds: float = 60.0) -> None:
        """Wait until a JavaScript expression, in which `chairlift` is known, holds."""
        end = time.monotonic() + seconds
        while not self.known(script):
            # Not playwright's own way to wait: it evaluates text in the page, which the page's policy forbids.
            assert time.monotonic() < end, f"this never came to hold: {script}"
            self.page.wait_for_timeout(30)

    def until_text(self, selector: str, text: str) -> None:
        """Wait until an element has a text."""
        self.until(f"document.querySelector({json.dumps(selector)})?.textContent.includes({json.dumps(text)})")

    def violations(self) -> list[str]:
        """What axe-core finds that is serious or critical, with the elements."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        return [f"{each['id']}: {[node['target'] for node in each['nodes']]}" for each in serious]


@contextmanager
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def visiting(browser: Any, url: str, **context: Any) -> Iterator[Visit]:
    """A page in a context of its own, as a new user sees it."""
    opened = browser.new_context(viewport={"width": 1280, "height": 900}, **context)
    opened.set_default_timeout(120_000)  # ms: machines that run tests are busy
    visit = Visit(opened.new_page())
    visit.page.on("request", lambda request: visit.urls.append(request.url))
    visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    visit.page.on("console", lambda line: visit.complaints.append(line.text) if line.type == "error" else None)
    visit.page.goto(url)
    try:
        yield visit
    finally:
        opened.close()
