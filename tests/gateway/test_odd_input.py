"""Odd text, odd bodies, odd ends: what is served is right, what isn't is refused, and nothing stays behind."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tests.e2e.cluster import eventually
from tests.gateway.gateways import WAIT_S, GatewayCluster, post_bytes

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PLAIN: dict[str, Any] = {"prompt": "a", "max_tokens": 60, "seed": 3, "ignore_eos": True}
WIDE = {"regex": "(é|漢|🙂){12}"}
"""Characters of 2, 3 and 4 bytes; the model's tokens are single bytes."""
WIDE_TEXT: dict[str, Any] = {"max_tokens": 60, "seed": 1, "structured_outputs": WIDE}


def streamed(gateway: GatewayCluster, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [event["choices"][0] for event in gateway.post(path, body | {"stream": True}).events]


def test_offsets_of_a_completions_tokens_stand_where_their_characters_begin(gateway: GatewayCluster) -> None:
    body = WIDE_TEXT | {"prompt": "é", "logprobs": 1, "return_token_ids": True}
    answer = gateway.post(COMPLETIONS, body).json["choices"][0]
    for parts in ([answer], streamed(gateway, COMPLETIONS, body)):
        offsets = [at for part in parts if part["logprobs"] for at in part["logprobs"]["text_offset"]]
        token_ids = [each for part in parts for each in part.get("token_ids", ())]
        text = "".join(part["text"] for part in parts)
        assert text == answer["text"]
        content = bytes(each for each in token_ids if each < 256)
        assert content.decode() == text
        assert len(text) == 12
        lead = [at for at, byte in enumerate(content) if byte & 0xC0 != 0x80]
        assert [offsets[at] for at in lead] == list(range(12))
        assert offsets == sorted(offsets)


@pytest.mark.parametrize("length", [*(pytest.param(length, marks=pytest.mark.full) for length in (1, 2)), 7])
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


def test_any_text_that_is_unicode_is_a_prompt(gateway: GatewayCluster) -> None:
    for text in ("\x00", "\u202e", "a\u0301\u0302\u0303", "\uffff", "👩‍👩‍👧‍👦", "\u2028", "\ufeffa"):
        answer = gateway.post(COMPLETIONS, PLAIN | {"prompt": text, "echo": True, "max_tokens": 1})
        assert answer.status == 200, ascii(text)
        assert answer.json["choices"][0]["text"].startswith(text), ascii(text)


def connected(gateway: GatewayCluster) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.http_port), timeout=WAIT_S)


def test_a_client_that_leaves_before_anything_is_made_holds_nothing(gateway: GatewayCluster) -> None:
    """Its prompt is long enough to be read in several steps; nothing of the reply is awaited."""
    steps = gateway.status("target").steps
    with connected(gateway) as leaving:
        body = PLAIN | {"prompt": [1] * 9000, "max_tokens": 20_000, "n": 4}
        leaving.sendall(post_bytes("localhost", COMPLETIONS, body))
        eventually(lambda: gateway.status("target").steps > steps, "the prompt is being read")
    gateway.wait_idle()
    eventually(lambda: gateway.get("/load").json["server_load"] == 0, "no request runs")
    assert gateway.post(COMPLETIONS, PLAIN).status == 200
