"""The page before a real gateway, coordinator, target and draft service: `make page`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway import browser
from tests.gateway.browser import expect
from tests.gateway.gateways import GatewayCluster

pytestmark = browser.needs_chromium
TIMED = "table:vocab=300,seed=1,step_ms=10"
NEAR = "table:vocab=300,seed=1,noise=0.3"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with GatewayCluster(folder, target_model=TIMED, drafters=(f"model:{NEAR}",)) as services:
        yield services


@pytest.fixture(scope="module")
def page(running: GatewayCluster) -> Iterator[Any]:
    with browser.chromium() as chromium:
        opened = chromium.new_page()
        opened.goto(f"http://{running.address_of('gateway')}")
        opened.get_by_label("Input").select_option("plain")
        opened.get_by_label("Prompt").fill("abc")
        opened.get_by_label("Temperature").fill("1")
        opened.get_by_label("Seed").fill("5")
        yield opened


def done(page: Any) -> None:
    browser.done(page)
    assert page.get_by_role("alert").text_content() == ""


def test_both_texts_are_the_same_and_rounds_are_drawn(page: Any) -> None:
    page.get_by_label("Drafter").select_option("model")
    browser.generate(page, "Run both", Most_tokens="60")
    done(page)
    expect(page.locator("#comparison")).to_contain_text("The texts are the same.")
    drafted, alone = page.locator(".panel").nth(0), page.locator(".panel").nth(1)
    assert drafted.locator(".token").count() == alone.locator(".token").count() == 60
    assert alone.locator(".token.target").count() == alone.locator(".round.alone").count() == 60
    assert drafted.locator(".token.accepted").count() > 0
    rounds = drafted.locator(".round").count()
    assert 0 < rounds < 60
    own = 60 - drafted.locator(".accepted").count()
    assert own in (rounds, rounds - 1), "every round ends with a token of the target's, the last one if it has room"
    drafted.locator(".token.accepted", has_text=re.compile(".")).first.hover()
    expect(drafted.locator(".token-detail")).to_contain_text("the draft chose the same")


def test_a_stopped_text_frees_its_sessions(page: Any, running: GatewayCluster) -> None:
    browser.generate(page, "Generate", Most_tokens="3000")
    expect(page.locator(".text .token").nth(20)).to_be_attached()
    expect(page.locator(".plot .round").nth(10)).to_be_attached()
    page.keyboard.press("Escape")
    expect(page.locator(".figures")).to_contain_text("stopped")
    assert page.locator(".plot .round").count() > 10, "what has ended stays"
    running.wait_idle()


def test_a_text_survives_the_coordinators_restart(page: Any, running: GatewayCluster) -> None:
    view = page.get_by_role("region", name="Cluster")
    browser.generate(page, "Generate", Most_tokens="400")
    done(page)
    whole = page.locator(".text").text_content()
    browser.generate(page, "Generate", Most_tokens="400")
    expect(page.locator(".text .token").nth(20)).to_be_attached()
    running.kill("coordinator")
    expect(view).to_contain_text("Coordinators that answer: 0 of 1.")
    running.restart("coordinator")
    done(page)
    assert page.locator(".text").text_content() == whole
    expect(view).to_contain_text("Coordinators that answer: 1 of 1. Linked targets: 1 of 1, draft services: 1 of 1.")
    browser.generate(page, "Generate", Most_tokens="30")
    done(page)
    assert whole.startswith(page.locator(".text").text_content())
