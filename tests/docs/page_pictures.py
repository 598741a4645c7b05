"""Writes the documents' pictures of the page: `make page-pictures`, with the pulled model and Debian's chromium."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.docs.stream_picture import FOLDER, MODEL, PROMPT
from tests.gateway.gateways import GatewayCluster

EXAMPLE = ".text .recovered, .text .accepted"
"""What the pictures point at: the first of these tokens."""
DONE_MS = 90_000
CROWD, CROWD_TOKENS = 4, 256
GROUP = re.compile(r"group(rest|copy matches|draft)")
WIDE, PHONE = {"width": 1200, "height": 900}, {"width": 360, "height": 740}


def main() -> None:
    """Run the services and take all pictures."""
    folder = Path(tempfile.mkdtemp())
    services = GatewayCluster(
        folder, {"model": MODEL}, drafters=("model:default",), draft_flags={"target_model": MODEL}
    )
    services.target_model = MODEL
    with services, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        take_all(browser, f"http://{services.address_of('gateway')}")
        browser.close()


def take_all(browser: Browser, url: str) -> None:
    """The four pictures."""
    with opened(browser, url, "light", WIDE) as page:
        generate(page, "Generate")  # so that no picture has a service's first step
        generate(page, "Run both")
        page.locator(EXAMPLE).first.hover()
        shoot(page, "page-light")
        with crowd(url):
            expect(page.locator(".cluster")).to_contain_text(GROUP, timeout=DONE_MS)
            page.locator(".cluster").screenshot(path=FOLDER / "page-cluster.png")
    with opened(browser, url, "dark", WIDE) as page:
        generate(page, "Generate")
        page.locator(EXAMPLE).first.hover()
        shoot(page, "page-dark")
    with opened(browser, url, "light", PHONE) as page:
        generate(page, "Generate")
        page.locator("#output").scroll_into_view_if_needed()
        page.locator(".text .accepted").first.click()
        shoot(page, "page-phone")


@contextmanager
def crowd(url: str) -> Iterator[None]:
    """Users of one target, whose requests are judged together."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": CROWD_TOKENS, "ignore_eos": True}
    with ThreadPoolExecutor(CROWD) as pool:
        for _ in range(CROWD):
            pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=None)
        yield


@contextmanager
def opened(browser: Browser, url: str, scheme: Any, size: Any) -> Iterator[Page]:
    """The page in one theme and size."""
    context = browser.new_context(
        viewport=size, color_scheme=scheme, has_touch=size is PHONE, is_mobile=size is PHONE
    )
    page = context.new_page()
    page.goto(url)
    yield page
    context.close()


def generate(page: Page, button: str) -> None:
    """Run the example to its end."""
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Drafter").select_option("ngram")
    page.get_by_role("button", name=button).click()
    expect(page.locator("#announcer")).not_to_contain_text("Done")
    expect(page.locator("#announcer")).to_contain_text("Done", timeout=DONE_MS)


def shoot(page: Page, name: str) -> None:
    """All that is above the cluster."""
    bottom = page.locator(".cluster").evaluate("e => e.getBoundingClientRect().top + window.scrollY")
    width = page.viewport_size["width"] if page.viewport_size else WIDE["width"]
    clip: Any = {"x": 0, "y": 0, "width": width, "height": bottom - 8}
    page.screenshot(path=FOLDER / f"{name}.png", full_page=True, clip=clip)


if __name__ == "__main__":
    main()
