"""Where endpoints come from: fixed, DNS, a file; what can't be told keeps the last answer."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.protocol.errors import InvalidInput
from paceline.rpc import endpoints
from paceline.rpc.endpoints import Endpoint, EndpointSource, EndpointWatch
from tests.rpc.harness import background, until


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:70000", "dns:///host", "a b:1", "dns:host:1"])
def test_what_is_no_endpoint_is_refused_with_its_field(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"target\.address"):
        EndpointSource.parse("target.address", text)


@pytest.mark.parametrize("text", ["host:1", "127.0.0.1:50053", "[::1]:50053"])
async def test_fixed_addresses_are_asked_once(text: str) -> None:
    source = EndpointSource.parse("target.address", text)
    assert source.period_s is None
    assert await source.resolve() == (Endpoint(text),)


async def test_a_name_is_every_address_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append((host, port))
        addresses = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    source = EndpointSource.parse("draft.address", "dns:///drafts.example:50052")
    assert await source.resolve() == [
        Endpoint("10.0.0.1:50052", "drafts.example"),
        Endpoint("10.0.0.2:50052", "drafts.example"),
        Endpoint("[fd00::1]:50052", "drafts.example"),
    ]
    assert asked == [("drafts.example", 50052)]
    assert source.period_s == endpoints.DNS_PERIOD_S


async def test_a_file_has_one_endpoint_a_line(tmp_path: Path) -> None:
    file = tmp_path / "targets"
    file.write_text("# written by hand\n\n a:1 \nb:2\n")
    source = EndpointSource.parse("target.address", f"file:{file}")
    assert await source.resolve() == [Endpoint("a:1"), Endpoint("b:2")]
    file.write_text("a:1\nnonsense\n")
    with pytest.raises(InvalidInput, match="nonsense"):
        await source.resolve()


class Answers:
    """A source that answers what the test says, and what a watch of it has told."""

    def __init__(self, answer: list[Endpoint]) -> None:
        self.answer: list[Endpoint] | Exception = answer
        self.asked = 0
        self.told: list[tuple[Endpoint, ...]] = []
        self.watch = EndpointWatch([EndpointSource("test", self._resolve, 0.0)], self.told.append)

    async def _resolve(self) -> list[Endpoint]:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def asked_again(self) -> None:
        """Wait until what is answered now has been asked for."""
        before = self.asked
        await until(lambda: self.asked >= before + 2)


async def test_a_source_that_fails_keeps_its_last_answer_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers([Endpoint("a:1")])
    async with background(answers.watch.run()):
        await answers.asked_again()
        answers.answer = socket.gaierror(-2, "no such name")
        await answers.asked_again()
        await answers.asked_again()
        assert answers.told == [(Endpoint("a:1"),)]
        assert caplog.text.count("endpoints not found: source=test kept=1") == 1
        answers.answer = []
        await answers.asked_again()
    assert answers.told == [(Endpoint("a:1"),), ()], "an empty answer is an answer"


async def test_sources_are_told_together_each_address_once() -> None:
    told: list[tuple[Endpoint, ...]] = []
    sources = [EndpointSource.parse("target.address", text) for text in ("a:1", "b:1", "a:1")]
    await EndpointWatch(sources, told.append).run()
    assert told[-1] == (Endpoint("a:1"), Endpoint("b:1"))


async def test_a_source_of_too_many_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers([Endpoint(f"a:{n}") for n in range(endpoints.MAX_ENDPOINTS + 1)])
    async with background(answers.watch.run()):
        await answers.asked_again()
    assert answers.told == []
    assert f"at most {endpoints.MAX_ENDPOINTS}" in caplog.text
