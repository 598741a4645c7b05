"""The page in Debian's chromium: who imports this is skipped where playwright is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
sync_api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

needs_chromium = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed"),
]


@contextmanager
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def generate(page: Any, button: str = "Generate", **fields: str) -> None:
    """Fill fields by their labels, and press a button."""
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.get_by_role("button", name=button).click()


def done(page: Any) -> None:
    expect(page.locator("#announcer")).to_contain_text("Done", timeout=30_000)
