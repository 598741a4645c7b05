"""Odd text, odd bodies, odd ends: what is served is right, what isn't is refused, and nothing stays behind."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.e2e.cluster import eventually
from tests.gateway.gateways import WAIT_S, GatewayCluster

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PLAIN: dict[str, Any] = {"prompt": "a", "max_tokens": 60, "seed": 3, "ignore_eos": True}
WIDE = {"regex": "(é|漢|🙂){12}"}
"""Characters of 2, 3 and 4 bytes; the model's tokens are single bytes."""
WIDE_TEXT: dict[str, Any] = {"max_tokens": 60, "seed": 1, "structured_outputs": WIDE}


def streamed(gateway: GatewayCluster, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    content = gateway.post(path, body | {"stream": True}).content
    lines = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_offsets_of_a_completions_tokens_stand_where_their_characters_begin(
    gateway: GatewayCluster, stream: bool
) -> None:
    body = WIDE_TEXT | {"prompt": "é", "logprobs": 1, "return_token_ids": True}
    answer = gateway.post(COMPLETIONS, body).json["choices"][0]
    if stream:
        parts = streamed(gateway, COMPLETIONS, body)
        offsets = [at for part in parts if part["logprobs"] for at in part["logprobs"]["text_offset"]]
        token_ids = [each for part in parts for each in part.get("token_ids", ())]
        text = "".join(part["text"] for part in parts)
        assert text == answer["text"]
    else:
        offsets, token_ids, text = answer["logprobs"]["text_offset"], answer["token_ids"], answer["text"]
    content = bytes(each for each in token_ids if each < 256)
    assert content.decode() == text
    assert len(text) == 12
    lead = [at for at, byte in enumerate(content) if byte & 0xC0 != 0x80]
    assert [offsets[at] for at in lead] == list(range(12))
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_chats_log_probabilities_are_one_for_each_token(gateway: GatewayCluster, stream: bool) -> None:
    body = WIDE_TEXT | {
        "messages": [{"role": "user", "content": "é"}],
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
    }
    parts = streamed(gateway, CHAT, body) if stream else [gateway.post(CHAT, body).json["choices"][0]]
    token_ids = [each for part in parts for each in part.get("token_ids", ())]
    rows = [row for part in parts if part["logprobs"] for row in part["logprobs"]["content"]]
    assert len(rows) == len(token_ids) > 24
    assert all(len(row["top_logprobs"]) == 1 and row["logprob"] <= row["top_logprobs"][0]["logprob"] for row in rows)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_stop_string_is_found_across_tokens_and_rounds(gateway: GatewayCluster, length: int) -> None:
    whole = gateway.post(COMPLETIONS, PLAIN).json["choices"][0]["text"]
    for begin in range(3, len(whole) - length, 5):
        stop = whole[begin : begin + length]
        parts = streamed(gateway, COMPLETIONS, PLAIN | {"stop": stop})
        assert "".join(part["text"] for part in parts) == whole[: whole.find(stop)]
        assert parts[-1]["finish_reason"] == "stop"


def test_min_tokens_counts_before_stops_and_one_token_is_one(gateway: GatewayCluster) -> None:
    ids = gateway.post(COMPLETIONS, PLAIN | {"return_token_ids": True}).json["choices"][0]["token_ids"]
    at = next(place for place in range(4, len(ids)) if ids.index(ids[place]) == place)
    stopping = PLAIN | {"stop_token_ids": [ids[at]], "return_token_ids": True}
    ended = gateway.post(COMPLETIONS, stopping | {"min_tokens": at}).json["choices"][0]
    assert (ended["token_ids"][:at], ended["finish_reason"]) == (ids[:at], "stop")
    later = gateway.post(COMPLETIONS, stopping | {"min_tokens": at + 1}).json["choices"][0]
    assert len(later["token_ids"]) > at
    assert later["token_ids"][at] != ids[at], "it is forbidden there"
    one = gateway.post(COMPLETIONS, PLAIN | {"max_tokens": 1}).json
    assert (one["usage"]["completion_tokens"], one["choices"][0]["finish_reason"]) == (1, "length")


def test_a_prompt_of_token_ids_is_echoed_as_its_text(gateway: GatewayCluster) -> None:
    prompt = list("é漢".encode())
    choice = gateway.post(COMPLETIONS, PLAIN | {"prompt": prompt, "echo": True, "logprobs": 0}).json["choices"][0]
    plain = gateway.post(COMPLETIONS, PLAIN | {"prompt": prompt}).json["choices"][0]
    assert choice["text"] == "é漢" + plain["text"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"][: len(prompt) + 1] == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "text", ["\x00", "\u202e", "a\u0301\u0302\u0303", "\uffff", "👩‍👩‍👧‍👦", "\u2028", "\ufeffa"], ids=ascii
)
def test_any_text_that_is_unicode_is_a_prompt(gateway: GatewayCluster, text: str) -> None:
    answer = gateway.post(COMPLETIONS, PLAIN | {"prompt": text, "echo": True, "max_tokens": 1})
    assert answer.status == 200
    assert answer.json["choices"][0]["text"].startswith(text)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/messages/count_tokens", "/detokenize"])
@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"input": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}', 400),
        (b'{"model": "' + b"a" * (4 << 20) + b'"}', 413),
    ],
    ids=["empty", "cut", "deep list", "deep object", "lone surrogate", "huge"],
)
def test_a_body_of_a_dialect_that_is_none_is_refused(
    gateway: GatewayCluster, path: str, content: bytes, status: int
) -> None:
    answer = gateway.post(path, content)
    assert answer.status == status, answer.content
    anthropic = path.startswith("/v1/messages")
    assert set(answer.json["error"]) == ({"type", "message"} if anthropic else {"message", "type", "param", "code"})


def test_of_a_key_that_is_there_twice_the_last_value_counts(gateway: GatewayCluster) -> None:
    twice = b'{"prompt": "b", "prompt": "a", "max_tokens": 1, "max_tokens": 5, "seed": 1}'
    once = gateway.post(COMPLETIONS, {"prompt": "a", "max_tokens": 5, "seed": 1})
    assert gateway.post(COMPLETIONS, twice).json["choices"] == once.json["choices"]


def test_a_body_that_comes_byte_by_byte_is_read(gateway: GatewayCluster) -> None:
    content = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    address = gateway.address_of("gateway")
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        for byte in f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content:
            slow.send(bytes((byte,)))
        assert slow.recv(12) == b"HTTP/1.1 200"


def test_a_client_that_leaves_before_anything_is_made_holds_nothing(gateway: GatewayCluster) -> None:
    """Its prompt is long enough to be read in several steps; nothing of the reply is awaited."""
    body = json.dumps(PLAIN | {"prompt": [1] * 9000, "max_tokens": 20_000, "n": 4}).encode()
    address = gateway.address_of("gateway")
    host, port = address.rsplit(":", 1)
    steps = gateway.status("target").steps
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as leaving:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: gateway.status("target").steps > steps, "the prompt is being read")
    gateway.wait_idle()
    eventually(lambda: gateway.get("/load").json["server_load"] == 0, "no request runs")
    assert gateway.post(COMPLETIONS, PLAIN).status == 200
