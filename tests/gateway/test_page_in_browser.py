"""The page as a person uses it, in Debian's chromium before a scripted backend: `make page`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.e2e.cluster import eventually
from tests.gateway.page_backend import PageBackend, ScriptedToken, cluster, passage, peer, served

CHROMIUM = shutil.which("chromium")
sync_api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
pytestmark = [pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")]
TEXT = "".join(token.text for token in passage())
HOSTILE = (
    '<img src=x onerror="document.title=`owned`">',
    "</div><script>document.title='owned'</script>",
    "javascript:alert(1)",
    "&lt;b&gt;&#60;",
    "\u202egnp.exe",
    "🦀🌊",
    "é\u0000\u2028",
)


@pytest.fixture(scope="module")
def opened_browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def backend() -> Iterator[PageBackend]:
    scripted = PageBackend()
    with served(scripted.app()) as scripted.url:
        yield scripted


@pytest.fixture
def page(opened_browser: Any, backend: PageBackend) -> Iterator[Any]:
    """The page, opened; whatever its console or its policy complains of fails the test."""
    context = opened_browser.new_context(viewport={"width": 1200, "height": 900})
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    opened.goto(backend.url)
    opened.expected_complaints = []
    yield opened
    context.close()
    unexpected = [text for text in complaints if not any(re.search(e, text) for e in opened.expected_complaints)]
    assert not unexpected


def generate(page: Any, button: str = "Generate") -> None:
    page.get_by_label("Prompt").fill("Name three rivers.")
    page.get_by_role("button", name=button).click()


def done(page: Any) -> None:
    expect(page.locator("#announcer")).to_contain_text("Done", timeout=30_000)


def problem(page: Any) -> Any:
    return page.get_by_role("alert")


def test_text_streams_coloured_by_provenance_and_figures_are_right(page: Any, backend: PageBackend) -> None:
    page.get_by_label("Seed").fill("41")
    page.get_by_label("Temperature").fill("0.8")
    expect(page.get_by_label("Drafter").locator("option")).to_have_count(5)
    page.get_by_label("Drafter").select_option("small")
    generate(page)
    done(page)
    assert page.locator(".text").text_content() == TEXT
    names = page.locator(".text .token").evaluate_all("all => all.map(e => e.className)")
    assert [name.split()[1] for name in names] == [token.provenance for token in passage()]
    figures = dict(
        page.locator(".figures > div").evaluate_all("all => all.map(e => [...e.children].map(c => c.textContent))")
    )
    assert figures["tokens"] == str(len(passage()))
    assert figures["acceptance"] == f"{100 * 36 / 40:.0f} %"
    assert figures["mean accepted length"] == "4.00"
    assert figures["seed"] == "41"
    behind_the_first = sum(each["round_ms"] for each in backend.rounds[1:]) / 1e3
    assert float(figures["tokens per second"]) == pytest.approx((len(passage()) - 1) / behind_the_first, abs=0.1)
    expect(page.locator(".plot .round")).to_have_count(14)
    (asked,) = backend.asked
    assert (asked["seed"], asked["temperature"], asked["max_tokens"]) == (41, 0.8, 128)
    assert asked["paceline"] == {"rounds": True, "drafter": "small"}
    assert asked["messages"] == [{"role": "user", "content": "Name three rivers."}]


def test_plain_text_goes_to_completions_and_drafter_none_is_target_only(page: Any, backend: PageBackend) -> None:
    page.get_by_label("Input").select_option("plain")
    page.get_by_label("Drafter").select_option("none")
    generate(page)
    done(page)
    assert backend.asked[0]["prompt"] == "Name three rivers."
    assert backend.asked[0]["paceline"] == {"rounds": True, "off": True}
    assert page.locator(".text").text_content() == TEXT
    page.locator(".text .token").nth(2).hover()
    expect(page.locator(".token-detail")).to_contain_text("probability 78 %")


def test_hover_and_tables_tell_probability_and_the_drafts_choice(page: Any) -> None:
    generate(page)
    done(page)
    page.locator(".text .recovered").first.hover()
    detail = page.locator(".token-detail")
    expect(detail).to_contain_text("recovered · probability 78 % · the draft chose “ hill” · next to “ other” 14 %")
    page.locator(".text .accepted").first.hover()
    expect(detail).to_contain_text("accepted · probability 78 % · the draft chose the same")
    page.locator(".plot .round").nth(2).hover()
    expect(page.locator(".round-detail")).to_contain_text("round 3 · small, 3 of 4 accepted, drafted ahead")
    page.get_by_text("Tokens as a table").click()
    rows = page.get_by_role("region", name="Tokens").get_by_role("row")
    expect(rows).to_have_count(1 + len(passage()))
    expect(rows.nth(6)).to_contain_text("recovered78 %“ hill”")
    page.get_by_text("Rounds as a table").click()
    expect(page.get_by_role("region", name="Rounds").get_by_role("row")).to_have_count(15)
    snapshot = page.locator("body").aria_snapshot()
    for named in ('textbox "Prompt"', 'button "Generate"', 'group "Generated text.', 'region "Cluster"', "status"):
        assert named in snapshot


def test_all_of_it_by_keyboard(page: Any, backend: PageBackend) -> None:
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.locator(":focus").evaluate("e => e.id || e.textContent"))
    assert reached[:11] == [
        "Skip to the text", "theme", "prompt", "input", "drafter", "temperature", "seed", "most", "key", "run",
        "both",
    ]  # fmt: skip
    page.get_by_label("Prompt").focus()
    page.keyboard.type("Name three rivers.")
    page.keyboard.press("Control+Enter")
    done(page)
    assert len(backend.asked) == 1
    page.locator(".text").focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(page.locator(".token-detail")).to_contain_text("3. “Rivers” · accepted")
    assert page.locator(".text .current").count() == 1
    page.keyboard.press("End")
    expect(page.locator(".token-detail")).to_contain_text(f"{len(passage())}. ")
    page.locator(".plot").focus()
    page.keyboard.press("End")
    expect(page.locator(".round-detail")).to_contain_text("round 14")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".round-detail")).to_contain_text("round 13")


def test_rounds_are_drawn_while_the_text_streams(page: Any, backend: PageBackend) -> None:
    backend.held_after = 12
    generate(page)
    bars = page.locator(".plot .round")
    ended = len(backend.rounds) * 12 // len(range(0, len(passage()), 3))
    expect(bars).to_have_count(ended)
    assert 5 < ended < len(backend.rounds)
    plot = page.locator(".plot").bounding_box()
    boxes = [bars.nth(i).bounding_box() for i in range(ended)]
    assert all(one["x"] < other["x"] for one, other in pairwise(boxes))
    assert boxes[-1]["x"] + boxes[-1]["width"] <= plot["x"] + plot["width"] + 1
    bars.nth(3).hover()
    expect(page.locator(".round-detail")).to_contain_text("round 4 · small")
    page.keyboard.press("Escape")
    expect(page.locator(".figures")).to_contain_text("stopped")
    page.get_by_text("Rounds as a table").click()
    expect(page.get_by_role("region", name="Rounds").get_by_role("row")).to_have_count(1 + ended)


def test_stopping_ends_the_request_and_keeps_the_text(page: Any, backend: PageBackend) -> None:
    backend.held_after = 4
    generate(page)
    expect(page.locator(".text .token")).to_have_count(12)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".figures")).to_contain_text("stopped")
    eventually(lambda: backend.ended == ["cut"], "the backend sees its client go")
    assert page.locator(".text .token").count() == 12
    assert problem(page).text_content() == ""
    backend.held_after = None
    generate(page)
    done(page)
    assert page.locator(".text").text_content() == TEXT


def test_hostile_text_stays_text(page: Any, backend: PageBackend) -> None:
    backend.script = [ScriptedToken(text, "recovered", HOSTILE[0]) for text in HOSTILE]
    backend.cluster = cluster()
    (model,) = backend.cluster["coordinators"][0]["models"]
    model["name"] = model["peers"][0]["address"] = HOSTILE[1]
    model["drafters"] = [HOSTILE[0], "auto"]
    before = page.locator("script, img, iframe").count()
    generate(page)
    done(page)
    spans = page.locator(".text .token")
    assert [spans.nth(i).text_content() for i in range(len(HOSTILE))] == list(HOSTILE)
    spans.first.hover()
    expect(page.locator(".token-detail")).to_contain_text(f"the draft chose “{HOSTILE[0]}”")
    page.get_by_text("Tokens as a table").click()
    expect(page.locator("#served")).to_have_text(HOSTILE[1])
    backend.refusal = (400, HOSTILE[1])
    page.expected_complaints.append("400")
    generate(page)
    expect(problem(page)).to_have_text(HOSTILE[1])
    assert page.locator("script, img, iframe").count() == before
    assert page.title() == "Paceline"


def test_run_both_compares(page: Any, backend: PageBackend) -> None:
    generate(page, "Run both")
    done(page)
    drafted, alone = backend.asked
    assert drafted["seed"] == alone["seed"]
    assert (drafted["paceline"], alone["paceline"]) == ({"rounds": True}, {"rounds": True, "off": True})
    expect(page.locator("#comparison")).to_have_text(
        re.compile(r"^The texts are the same\. With drafts: \d+\.\d\d times the speed of target-only\.$")
    )
    widths = [box["width"] for i in (0, 1) if (box := page.locator(".plot .round").nth(13 * i).bounding_box())]
    assert len(widths) == 2
    last = [page.locator(".panel").nth(i).locator(".round").last.bounding_box() for i in (0, 1)]
    ends = [box["x"] + box["width"] - page.locator(".plot").nth(i).bounding_box()["x"] for i, box in enumerate(last)]
    assert ends[0] < 0.5 * ends[1], "both charts have one time axis"
    backend.alone = [*passage()[:-1], ScriptedToken(" otherwise")]
    generate(page, "Run both")
    done(page)
    expect(page.locator("#comparison")).to_contain_text("The texts differ")


def test_failures_are_told_and_the_next_request_works(page: Any, backend: PageBackend) -> None:
    page.expected_complaints.append("503")
    backend.refusal = (503, "no target is linked")
    generate(page)
    expect(problem(page)).to_have_text("no target is linked")
    backend.refusal, backend.error = None, "the target was lost"
    generate(page)
    expect(problem(page)).to_have_text("the target was lost")
    assert page.locator(".text").text_content() == TEXT
    backend.error, backend.cut_after = "", 3
    generate(page)
    expect(problem(page)).to_contain_text("broke off")
    backend.cut_after = None
    page.get_by_label("Seed").fill("1.5")
    generate(page)
    expect(problem(page)).to_contain_text("Seed: 1.5")
    page.get_by_label("Seed").fill("")
    generate(page)
    done(page)
    assert problem(page).text_content() == ""


def test_a_screen_reader_hears_progress_now_and_then(page: Any, backend: PageBackend) -> None:
    page.locator("#announcer").evaluate(
        "e => { window.said = [];"
        " new MutationObserver(() => said.push(e.textContent)).observe(e, {childList: true}); }"
    )
    backend.script, backend.rounds = passage(300), []
    backend.pause_s = 0
    generate(page)
    done(page)
    said = page.locator("#announcer").evaluate("() => said")
    assert said[0] == "Generated: generating"
    assert said[-1] == f"Done: {len(passage(300))} tokens"
    assert len(said) < 6, "400 chunks, a few announcements"


@pytest.mark.parametrize("width", [320, 768])
def test_a_narrow_screen_needs_no_scrolling_sideways(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 640})
    generate(page, "Run both")
    done(page)
    assert page.locator("html").evaluate("e => e.scrollWidth") <= width
    for name in ("Generate", "Run both", "Stop"):
        assert page.get_by_role("button", name=name).bounding_box()["height"] >= 36


def test_themes_follow_the_system_and_the_choice_is_kept(page: Any) -> None:
    def ground() -> str:
        return str(page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor"))

    page.emulate_media(color_scheme="light")
    light = ground()
    page.emulate_media(color_scheme="dark")
    dark = ground()
    assert light != dark
    page.get_by_label("Theme").select_option("light")
    assert ground() == light
    page.reload()
    assert ground() == light


def test_the_cluster_is_shown_and_followed(page: Any, backend: PageBackend) -> None:
    view = page.get_by_role("region", name="Cluster")
    expect(view).to_contain_text("Coordinators that answer: 1 of 1. Linked targets: 1 of 2, draft services: 1 of 1.")
    expect(view.locator(".target .card.down")).to_contain_text("connection refused")
    expect(view.locator(".target .card:not(.down)")).to_contain_text("draft, 1.32 × resting")
    changed = cluster()
    changed["coordinators"][0]["models"][0]["peers"] = [peer("target", "10.0.0.2:50052")]
    backend.cluster = changed
    expect(view).to_contain_text("Linked targets: 1 of 1, draft services: 0 of 0.")
    backend.cluster = {
        "coordinators": [{"address": "c:1", "requests": 0, "reachable": False, "problem": "gone", "models": []}]
    }
    expect(view).to_contain_text("no answer")
    expect(page.locator("#served")).to_have_text("no coordinator answers")


def test_a_key_is_sent_with_everything_and_kept_nowhere(page: Any, backend: PageBackend) -> None:
    page.expected_complaints.append("401")
    backend.key = "k-1"
    page.reload()
    expect(page.locator("#cluster-state")).to_have_text("an API key is needed")
    generate(page)
    expect(problem(page)).to_have_text("an API key is needed")
    page.get_by_label("API key").fill("k-1")
    expect(page.locator("#served")).to_have_text("smollm2-135m")
    generate(page)
    done(page)
    assert page.locator("html").evaluate("() => JSON.stringify([localStorage, sessionStorage, document.cookie])") == (
        '[{},{},""]'
    )
