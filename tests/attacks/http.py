"""D16, D20: clients of the HTTP gateway that flood it, or take nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from paceline.access.keys import new_key
from tests.attacks.registry import attack
from tests.e2e.keys import write_keys
from tests.gateway.gateways import LONG, Answer, GatewayCluster, post

KEYS = {name: new_key() for name in ("attacker", "user")}
PATH = "/v1/completions"
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 8, "seed": 1}
NOTICED_S = 3.0
"""What another user may wait on a busy machine; before, it was 8 to 45 s."""
GROWN_BYTES = 96 << 20
HEADS = 1300
UNREAD = 300


class Besieged(GatewayCluster):
    """A gateway whose coordinator asks for keys."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "keys.json"
        write_keys(file, KEYS)
        super().__init__(folder, coordinator_flags={"api_keys": str(file)}, **options)
        self.api_key = KEYS["user"]
        self.waits: list[float] = []

    @property
    def at(self) -> str:
        return self.address_of("gateway")

    def ask(self, body: object = SHORT, key: str = "user") -> Answer:
        content = json.dumps(body, separators=(",", ":")).encode()
        return post(self.at, PATH, content, Authorization=f"Bearer {KEYS[key]}")

    @property
    def gateway_bytes(self) -> int:
        return psutil.Process(self.processes["gateway"].pid).memory_info().rss

    async def serve_user(self) -> None:
        """Ask for what the user wants again and again, and note how long it takes."""
        while True:
            began = time.monotonic()
            answer = await asyncio.to_thread(self.ask)
            self.waits.append(time.monotonic() - began)
            assert answer.status == 200, (answer.status, answer.content[:200])
            await asyncio.sleep(0.02)


@asynccontextmanager
async def besieged(folder: Path, **options: Any) -> AsyncIterator[Besieged]:
    """A gateway with a user beside the attack, who is served all the time and behind it."""
    cluster = Besieged(folder, **options)
    await asyncio.to_thread(cluster.__enter__)
    try:
        text = (await asyncio.to_thread(cluster.ask)).json["choices"][0]["text"]
        before = cluster.gateway_bytes
        user = asyncio.create_task(cluster.serve_user())
        yield cluster
        await asyncio.sleep(0.1)
        assert not user.done(), user.exception()
        user.cancel()
        await asyncio.gather(user, return_exceptions=True)
        grown = cluster.gateway_bytes - before
        assert (await asyncio.to_thread(cluster.ask)).json["choices"][0]["text"] == text
        assert max(cluster.waits) < NOTICED_S, f"another user waited {max(cluster.waits):.1f} s"
        assert grown < GROWN_BYTES, f"the gateway grew by {grown >> 20} MiB"
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)


def told(cluster: Besieged, more: str) -> str:
    return f"another user waited {max(cluster.waits):.2f} s at most; {more}"


async def sent(address: str, key: str, body: bytes, size: int) -> asyncio.StreamWriter:
    """A request's connection, whose answer nobody reads."""
    host, port = address.rsplit(":", 1)
    _, writer = await asyncio.open_connection(host, int(port), limit=1)
    head = f"POST {PATH} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode() + body)
    return writer


@attack("D16", f"{HEADS} connections with a head, an invented key each, and no body")
async def heads_without_bodies(folder: Path) -> str:
    """They take no place."""
    async with besieged(folder) as cluster:
        writers = [await sent(cluster.at, f"invented-{number}", b"", 100) for number in range(HEADS)]
        await asyncio.sleep(3)
        for writer in writers:
            writer.close()
    return told(cluster, f"{len(cluster.waits)} of his requests of {len(cluster.waits)} were served")


@attack("D20", f"{UNREAD} streams of one key that nobody reads")
async def unread_streams(folder: Path) -> str:
    """Another key's requests begin beside them."""
    async with besieged(folder) as cluster:
        body = json.dumps(SHORT | {"max_tokens": LONG, "ignore_eos": True, "stream": True, "logprobs": 20}).encode()
        streams = [await sent(cluster.at, KEYS["attacker"], body, len(body)) for _ in range(UNREAD)]
        await asyncio.sleep(10)
        for stream in streams:
            stream.close()
    return told(cluster, f"{len(cluster.waits)} of his requests of {len(cluster.waits)} were served")
