"""The benchmark of servers with drafts, on two servers that are fakes; and the flags of those that it starts."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline_lab.bench import plugins

TOKENIZER = SimpleNamespace(render_chat=lambda chat: [1, 2, 3], eos_token_ids=(0,), decode=lambda ids: "words")


@contextmanager
def server(*, accepted: int, shift: int = 0, fails: bool = False) -> Iterator[str]:
    """Answers with tokens that count up from `shift`, of which so many of each text came from drafts."""
    counter = [0]

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def answer(self, text: str, status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            metrics = f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {counter[0]}.0\n'
            self.answer(metrics if self.path == "/metrics" else '{"version": "0.33.0"}')

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert asked["temperature"] == 0
            assert asked["ignore_eos"]
            counter[0] += accepted * len(asked["prompt"])
            ids = [*range(shift, shift + asked["max_tokens"])]
            choices = [{"index": at, "token_ids": ids} for at in reversed(range(len(asked["prompt"])))]
            self.answer("it can't" if fails else json.dumps({"choices": choices}), 500 if fails else 200)

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


def report(monkeypatch: pytest.MonkeyPatch, out: Path, plain: str, drafted: str) -> tuple[str, Any]:
    monkeypatch.setattr(plugins, "load_tokenizer", lambda model: TOKENIZER)
    asked = ["--model", "m", "--plain", plain, "--drafted", drafted, "--out", str(out)]
    plugins.main([*asked, "--kind", "chat", "--users", "1", "4", "--passes", "4", "--tokens", "12"])
    (markdown,), (values,) = out.glob("*.md"), out.glob("*.json")
    return markdown.read_text(), json.loads(values.read_text())


def test_servers_that_are_up_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with server(accepted=0) as plain, server(accepted=6) as drafted:
        text, values = report(monkeypatch, tmp_path, plain, drafted)
    rows = {(row["users"], row["mode"]): row for row in values["results"]}
    assert rows.keys() == {(users, mode) for users in (1, 4) for mode in ("plain", "drafts")}
    for users, runs in ((1, 4), (4, 1)):
        assert rows[users, "plain"]["tokens_per_step"] == 1
        assert rows[users, "drafts"]["tokens_per_step"] == 2
        assert rows[users, "drafts"]["same_as_plain"] == runs
        assert rows[users, "drafts"]["over_plain"]["count"] == runs
    assert values["facts"]["vllm"] == "0.33.0"
    assert "# Drafts behind vLLM" in text


def test_texts_that_differ_and_servers_that_fail_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with server(accepted=0) as plain, server(accepted=6, shift=1) as other, server(accepted=0, fails=True) as failing:
        _, values = report(monkeypatch, tmp_path / "other", plain, other)
        assert [row["same_as_plain"] for row in values["results"] if row["mode"] == "drafts"] == [0, 0]
        text, values = report(monkeypatch, tmp_path / "failing", plain, failing)
        assert {row["mode"] for row in values["results"]} == {"plain"}
        assert "it can't" in values["failures"]["vllm drafts"]
        assert "it can't" in text


@pytest.mark.parametrize(("runner", "method"), [(None, "custom_class"), ("v1", "custom_class"), ("v2", "ngram")])
def test_both_servers_have_one_runner_and_one_has_drafts(runner: str | None, method: str) -> None:
    asked = argparse.Namespace(runner=runner, num_draft_tokens=3, draft="127.0.0.1:9")
    plain, variables = plugins.flags_of("plain", asked)
    flags, same = plugins.flags_of("drafts", asked)
    assert (plain, variables) == ([], same)
    assert same == ({} if runner is None else {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))})
    assert json.loads(flags[1])["method"] == method
    assert json.loads(flags[3]) == {"paceline": {"draft": {"address": "127.0.0.1:9"}}}


def test_a_server_that_ends_later_is_told_with_its_log(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text(
        f"#!{sys.executable}\nimport http.server, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n    do_GET = lambda self: self.send_response(200)\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[4])), Handler).handle_request()\n"
        "sys.exit('no memory left')\n"
    )
    script.chmod(0o755)
    with pytest.raises(SystemExit, match=r"(?s)vllm \w+ has ended \(1\):.*no memory left"):
        plugins.main(["--model", "m", "--vllm", str(script), "--draft", "127.0.0.1:9", "--out", str(tmp_path)])


@pytest.mark.parametrize("asked", [[], ["--plain", "http://a"], ["--plain", "a", "--drafted", "b", "--draft", "c:1"]])
def test_it_is_told_which_servers(asked: list[str]) -> None:
    with pytest.raises(SystemExit, match="draft, or plain and drafted"):
        plugins.main(["--model", "m", *asked])
