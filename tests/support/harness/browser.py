"""Headless Chromium that talks to nobody but who it is told to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness import tools

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Any]:
    program = tools.find("chromium", "chromium-browser", "google-chrome")
    with tools.module("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()
