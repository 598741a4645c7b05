"""The page's reading of streams, in Node: events cut anywhere, code points, both shapes of probabilities."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline_gateway.page.routes import FOLDER

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's modules where Node knows them as such."""
    folder = tmp_path_factory.mktemp("page") / "page"
    shutil.copytree(FOLDER, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def in_node(module: Path, expression: str, given: Any) -> Any:
    """The value of an expression over `given` and what a module exports."""
    program = (
        f"import * as page from {json.dumps(module.as_uri())};"
        f"const given = {json.dumps(given)};"
        f"const value = await (async () => {expression})();"
        "console.log(JSON.stringify(value));"
    )
    assert NODE is not None
    command = [NODE, "--input-type=module", "-e", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


READ = """{
  const all = [];
  for (const pieces of given) {
    const body = new ReadableStream({ start(c) {
      for (const piece of pieces) c.enqueue(Uint8Array.from(piece));
      c.close();
    } });
    const found = [];
    for await (const data of page.eventData(body)) found.push(data);
    all.push(found);
  }
  return all;
}"""


def test_events_are_read_wherever_they_are_cut(modules: Path) -> None:
    lines = ['data: {"a": "🦀é"}', "", ": a comment", "event: x", "data:one", "data: two", "", "data: [DONE]", "", ""]
    pieces = []
    for end in ("\n", "\r\n", "\r"):
        sent = end.join(lines).encode()
        pieces += [*([list(sent[:at]), list(sent[at:])] for at in range(1, len(sent))), [[byte] for byte in sent]]
    expected = ['{"a": "🦀é"}', "one\ntwo", "[DONE]"]
    assert in_node(modules / "sse.js", READ, pieces) == [expected] * len(pieces)


def tokens(modules: Path, *chunks: Any) -> Any:
    """Those of each chunk."""
    return in_node(modules / "generation.js", "given.map(page.tokensOf)", chunks)


def chunk(text: str, ends: list[int], provenance: list[str], logprobs: Any = None, **told: Any) -> Any:
    details = {"token_ids": [7] * len(ends), "provenance": provenance, "text_ends": ends, **told}
    return {"choices": [{"text": text, "logprobs": logprobs}], "paceline": details}


def test_ends_count_characters_and_not_their_16_bit_halves(modules: Path) -> None:
    (result,) = tokens(modules, chunk("🦀é🌊x", [1, 1, 3, 4], ["accepted"] * 4))
    assert [each["text"] for each in result] == ["🦀", "", "é🌊", "x"]


def test_text_that_was_held_back_belongs_to_the_last_token(modules: Path) -> None:
    longer, shorter = chunk("abcd", [1, 2], ["target"] * 2), chunk("a", [1, 3], ["target"] * 2)
    *held, more, none = tokens(
        modules, longer, shorter, {"choices": [{"delta": {"content": "more"}}]}, {"choices": [], "usage": {}}
    )
    assert [[each["text"] for each in read] for read in held] == [["a", "bcd"], ["a", ""]]
    assert (more, none) == ([{"id": None, "text": "more"}], [])


def test_each_recovered_token_has_the_draft_that_it_replaced(modules: Path) -> None:
    provenance = ["accepted", "recovered", "accepted", "recovered", "bonus"]
    (result,) = tokens(modules, chunk("abcde", [1, 2, 3, 4, 5], provenance, replaced=["x", "y"]))
    assert [each.get("replaced") for each in result] == [None, "x", None, "y", None]


def test_probabilities_of_both_apis_are_read_alike(modules: Path) -> None:
    completion = {"token_logprobs": [-1.0], "top_logprobs": [{"b": -2.0, "a": -1.0}]}
    top = [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]
    chat = {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": top}]}
    read = tokens(modules, *(chunk("a", [1], ["target"], logprobs) for logprobs in (completion, chat)))
    expected = [{"text": "a", "logprob": -1.0}, {"text": "b", "logprob": -2.0}]
    assert read[0] == read[1]
    assert (read[0][0]["logprob"], read[0][0]["alternatives"]) == (-1.0, expected)


def test_partings_have_both_choices_and_what_stands_before(modules: Path) -> None:
    (read,) = tokens(
        modules, chunk("abcabd", [1, 2, 3, 4, 5, 6], [*["recovered", "accepted", "bonus"] * 2], replaced=["x", "x"])
    )
    (first, second) = in_node(modules / "partings.js", "page.partingsOf(given)", read)
    assert (first["place"], first["behind"], first["drafted"], first["own"], first["often"]) == (1, "", "x", "a", 2)
    assert (second["place"], second["behind"], second["often"]) == (4, "abc", 2)


def test_partings_show_the_end_of_a_long_text(modules: Path) -> None:
    long = [{"text": "🦀", "provenance": "accepted"}] * 40 + [{"text": "t", "replaced": "d", "logprob": -1.5}]
    (result,) = in_node(modules / "partings.js", "page.partingsOf(given)", long)
    assert result["behind"] == "🦀" * 24
    assert result["logprob"] == -1.5


def test_a_group_is_one_line(modules: Path) -> None:
    modes = [
        {"name": "rest", "gain": None, "wait_steps": 200.0},
        {"name": "matches", "gain": 1.02, "wait_steps": 0.0},
        {"name": "drafts", "gain": 0.9, "wait_steps": 12.5},
    ]
    lines: dict[str, dict[str, Any]] = {
        "draft, 1.32 × resting": {"mode": "drafts", "modes": [{"name": "drafts", "gain": 1.318}]},
        "rest": {"mode": "rest", "modes": [{"name": "rest", "gain": None}]},
        "copy matches, 1.02 × resting, may draft in 13 steps": {"mode": "matches", "modes": modes},
        "sideways": {"mode": "sideways"},
        "one request at most, by its own account": {"mode": "drafts", "sessions": 1},
    }
    usual: dict[str, Any] = {"sessions": 4, "modes": []}
    groups = [usual | group for group in lines.values()]
    assert in_node(modules / "cluster.js", "given.map(page.groupLine)", groups) == [*lines]
