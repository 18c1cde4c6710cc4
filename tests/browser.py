"""A headless browser for reports: the system's chromium, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def found() -> str | None:
    """The browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A browser. Skips the test by name where there is none, or nothing to drive it."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = found()
    if path is None:
        pytest.skip("there is no chromium on this machine (make browser)")
    with api.sync_playwright() as driver:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        one = driver.chromium.launch(executable_path=path, args=options)
        try:
            yield one
        finally:
            one.close()


class Visit:
    """A page that is open: what it complained about, and what it asked for from outside."""

    def __init__(self, browser: Any, file: Path, width: int = 1200, **context: Any):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("request", self._request)
        self.page.goto(file.absolute().as_uri())

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.asked.append(request.url)

    def look(self) -> None:
        """Goes down the page, as a reader does: plots are drawn when they come near."""
        height = self.page.evaluate("document.documentElement.scrollHeight")
        for y in range(0, height, 500):
            self.page.evaluate(f"scrollTo({{top: {y}, behavior: 'instant'}})")
            self.page.wait_for_timeout(40)
        self.page.evaluate("scrollTo({top: 0, behavior: 'instant'})")

    def drawn(self) -> tuple[int, int]:
        """Plots that are drawn, and those that should be: all but those in what is closed."""
        self.page.wait_for_timeout(150)
        open_ones = "[...document.querySelectorAll('.canvas')].filter(b => !b.closest('details:not([open])'))"
        return (
            self.page.evaluate(f"{open_ones}.filter(b => b.querySelector('.main-svg')).length"),
            self.page.evaluate(f"{open_ones}.length"),
        )

    def close(self) -> None:
        self.context.close()
