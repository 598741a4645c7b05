"""What the page's files promise without a browser: headers, nothing inline or from outside, labels, contrast."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import product

import pytest

from paceline_gateway.page.routes import FOLDER
from tests.gateway.gateways import Answer, request
from tests.gateway.page_backend import PageBackend, served

FILES = sorted(path.name for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py")
SCRIPTS = [name for name in FILES if name.endswith(".js")]
TEXT_CONTRAST, GRAPHIC_CONTRAST = 4.5, 3.0
"""WCAG 2.2, AA: 1.4.3 for text, 1.4.11 for what is not."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(PageBackend().app()) as at:
        yield at


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text inside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self._raw = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        self.inline += data if self._raw else ""


@pytest.fixture(scope="module")
def page() -> Elements:
    return Elements((FOLDER / "index.html").read_text())


def fetched(url: str, path: str, **headers: str) -> Answer:
    return request(url.removeprefix("http://"), "GET", path, None, headers)


@pytest.mark.parametrize("name", ["", *(f"page/{name}" for name in FILES)])
def test_every_file_has_the_headers_that_keep_it_to_itself(url: str, name: str) -> None:
    answer = fetched(url, f"/{name}")
    headers = answer.headers
    assert answer.status == 200
    assert answer.content == (FOLDER / (name.removeprefix("page/") or "index.html")).read_bytes()
    policy = dict(each.strip().partition(" ")[::2] for each in headers["content-security-policy"].split(";"))
    assert {policy[name] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


def test_an_unchanged_file_is_not_sent_again(url: str) -> None:
    tag = fetched(url, "/page/page.css").headers["etag"]
    again = fetched(url, "/page/page.css", If_None_Match=tag)
    assert (again.status, again.content, again.headers["etag"]) == (304, b"", tag)
    assert fetched(url, "/page/page.css", If_None_Match='"another"').status == 200


@pytest.mark.parametrize("name", ["routes.py", "..%2Fapp.py", "%2e%2e/app.py", "index.htm"])
def test_other_files_are_not_served(url: str, name: str) -> None:
    assert fetched(url, f"/page/{name}").status == 404


def test_nothing_is_inline_or_comes_from_outside(page: Elements) -> None:
    assert page.inline.strip() == ""
    attributes = [name for _, attrs in page.tags for name in attrs]
    assert not [name for name in attributes if name.startswith("on") or name == "style"]
    links = {value for _, attrs in page.tags for name in ("src", "href") if (value := attrs.get(name))}
    assert links == {"page/icon.svg", "page/page.css", "page/main.js", "#output"}
    for name in FILES:
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|url\(|@import|@font-face", text), name


def test_modules_import_files_that_exist_and_make_no_markup() -> None:
    for text in ((FOLDER / name).read_text() for name in SCRIPTS):
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= set(SCRIPTS)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|srcdoc", text)


def test_every_control_has_a_label(page: Elements) -> None:
    text = (FOLDER / "index.html").read_text()
    labelled = {attrs.get("for") for tag, attrs in page.tags if tag == "label"}
    inside = set(re.findall(r'<label[^>]*>[^<]*\S[^<]*<(?:input|select) id="(\w+)"', text))
    controls = {attrs["id"] for tag, attrs in page.tags if tag in ("input", "select", "textarea")}
    assert controls == {"prompt", "input", "drafter", "temperature", "seed", "most", "key", "theme"}
    assert controls <= labelled | inside
    for tag, attrs in page.tags:
        if attrs.get("tabindex") == "0":
            assert attrs.get("role") in ("group", "region") and attrs.get("aria-label"), (tag, attrs)


def palette() -> dict[str, tuple[str, str]]:
    """Each colour for light and for dark."""
    colours = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", (FOLDER / "page.css").read_text())
    return {name: (light, dark) for name, light, dark in colours}


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


TEXT = ("ink", "muted", "accent", "problem", "accepted", "recovered", "bonus", "target")
GRAPHICS = ("edge", "wait", "wire", "verify", "accept")


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast_is_enough(theme: int) -> None:
    colours = {name: both[theme] for name, both in palette().items()}
    pairs = [(name, ground, TEXT_CONTRAST) for name, ground in product(TEXT, ("paper", "sheet"))]
    pairs += [(name, "sheet", GRAPHIC_CONTRAST) for name in GRAPHICS]
    pairs += [("on-accent", "accent", TEXT_CONTRAST), ("sheet", "ink", TEXT_CONTRAST)]
    assert not [pair for *pair, least in pairs if contrast(*(colours[name] for name in pair)) < least]


def test_colour_is_not_the_only_sign() -> None:
    css = (FOLDER / "page.css").read_text()
    styles = re.findall(r"\.(accepted|recovered|bonus) {[^}]*text-decoration-style: (\w+)", css)
    assert len({style for _, style in styles}) == len(styles) == 3
