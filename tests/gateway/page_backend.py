"""A backend for the page without services: it streams what the gateway would, from a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from paceline_gateway.page.routes import add_page
from tests.gateway.test_connections import served as on_port

Json = dict[str, Any]
LOGPROB = -0.25
WORDS = ("Rivers", " run", " to", " the", " sea", ",", " and", " yet", " the", " sea", " is", " not", " full", ".\n")


@dataclass(frozen=True)
class ScriptedToken:
    """One token as the page is to get it; `replaced` is the draft's choice in a recovered one's place."""

    text: str
    provenance: str = "target"
    replaced: str | None = None


def passage(rounds: int = 12) -> list[ScriptedToken]:
    """Rounds of three accepted tokens and the target's own: recovered, bonus, recovered, …; one without a draft."""
    tokens = [ScriptedToken("The"), ScriptedToken(" poem")]
    for i in range(rounds):
        words = [WORDS[(4 * i + j) % len(WORDS)] for j in range(4)]
        tokens += [ScriptedToken(word, "accepted") for word in words[:3]]
        tokens += [ScriptedToken(words[3], "bonus") if i % 3 else ScriptedToken(words[3], "recovered", " hill")]
    return tokens


def record(index: int, proposed: int = 3, accepted: int = 3) -> Json:
    """One round's record as the gateway writes it."""
    step = {"queue_ms": 0.5, "forward_ms": 9.0, "sample_ms": 0.5, "service_ms": 10.0, "rows": 4, "sessions": 2}
    parts = {"draft_wait_ms": 2.0 + index % 3, "wire_ms": 0.8, "target": step, "draft": step, "accept_ms": 0.2}
    return {
        "base_length": 5 + 4 * index, "round_ms": 13.0 + index % 3, "proposed": proposed, "accepted": accepted,
        "drafter": "small" if proposed else "", "cache_hit": index % 2 == 0, "cache_miss": False,
        "self_started": False, **parts,
    }  # fmt: skip


def records(rounds: int = 12) -> list[Json]:
    """Those of `passage`."""
    alone = [record(0, 0, 0), record(1, 0, 0)]
    return alone + [record(i + 2, 4 if i % 3 == 0 else 3) for i in range(rounds)]


def speculation(rounds: Sequence[Json]) -> Json:
    """The records' sums in the shape of `metrics`."""
    drafted = [each for each in rounds if each["proposed"]]
    accepted, proposed = (sum(each[key] for each in drafted) for key in ("accepted", "proposed"))
    facts = {
        "num_spec_steps": len(drafted),
        "draft_acceptance_rate": accepted / max(1, proposed),
        "mean_acceptance_length": 1 + accepted / max(1, len(drafted)),
    }
    return {"speculative_decoding": facts}


GROUP = {"mode": "drafts", "sessions": 2, "modes": [{"name": "rest"}, {"name": "drafts", "gain": 1.318}]}
"""What requests do together at a target, as far as the page reads it."""


def peer(role: str, address: str, *, up: bool = True) -> Json:
    """A peer as `/cluster` tells of it."""
    step = {"step_sessions": 2, "step_rows": 9, "step_ms": 11.45}
    facts = {"model": "smollm2-135m", "sessions": 2, "queue": 1, **step}
    facts |= {"group": GROUP if role == "target" and up else None}
    return {"role": role, "address": address, "up": up, "problem": "" if up else "connection refused", **facts}


def cluster() -> Json:
    """Two targets, one of them down, and one draft service."""
    peers = [peer("target", "10.0.0.1:50052"), peer("target", "10.0.0.2:50052", up=False), peer("draft", "d:50053")]
    model = {"name": "smollm2-135m", "max_length": 2048, "drafters": ["auto", "ngram", "small"], "peers": peers}
    here = {"address": "127.0.0.1:50051", "requests": 1, "reachable": True, "problem": ""}
    return {"coordinators": [here | {"models": [model]}]}


@dataclass
class PageBackend:
    """What the backend answers, and what it was asked.

    Attributes:
        script: tokens of every stream.
        alone: tokens of streams with `paceline.off`; None: the same.
        cut_after: chunks after which a stream breaks off; None: none does.
        error: sent in mid-stream behind the script, in place of its end.
        refusal: status and message of every request.
        key: what requests must bring; empty: nothing.
        held_after: chunks after which a stream waits for ever; None: none does.
        cluster: what `/cluster` tells.
        asked: the bodies of all requests.
        ended: "whole" or "cut", as each stream ended.
    """

    script: Sequence[ScriptedToken] = field(default_factory=passage)
    alone: Sequence[ScriptedToken] | None = None
    rounds: Sequence[Json] = field(default_factory=records)
    cut_after: int | None = None
    error: str = ""
    refusal: tuple[int, str] | None = None
    key: str = ""
    pause_s: float = 0.002
    held_after: int | None = None
    cluster: Json = field(default_factory=cluster)
    asked: list[Json] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    url: str = ""

    def app(self) -> FastAPI:
        """The page, and a gateway's answers."""
        app = FastAPI()
        add_page(app)

        @app.post("/v1/completions")
        async def complete(request: Request) -> Any:
            return self._unknown(request) or self._answer(await request.json(), chat=False)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            return self._unknown(request) or self._answer(await request.json(), chat=True)

        @app.get("/cluster")
        async def view(request: Request) -> Any:
            return self._unknown(request) or self.cluster

        return app

    def _unknown(self, request: Request) -> Any:
        if not self.key or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "an API key is needed", "type": "authentication_error"}}, 401)

    def _answer(self, asked: Json, *, chat: bool) -> Any:
        self.asked.append(asked)
        if self.refusal is not None:
            status, message = self.refusal
            return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)
        return StreamingResponse(self._stream(asked, chat), media_type="text/event-stream")

    async def _stream(self, asked: Json, chat: bool) -> AsyncIterator[str]:
        whole = False
        try:
            async for sent in self._events(asked, chat):
                whole = whole or "[DONE]" in sent
                yield sent
        finally:
            self.ended.append("whole" if whole else "cut")

    async def _events(self, asked: Json, chat: bool) -> AsyncIterator[str]:
        off = asked["paceline"].get("off", False)
        script = self.alone if off and self.alone is not None else self.script
        rounds = [record(i, 0, 0) for i in range(len(script))] if off else list(self.rounds)
        starts = range(0, len(script), 3)
        for index, start in enumerate(starts):
            if index == self.cut_after:
                return
            if index == self.held_after:
                await asyncio.Event().wait()
            await asyncio.sleep(self.pause_s)
            made = chunk(script[start : start + 3], chat=chat, off=off)
            first, end = (len(rounds) * place // len(starts) for place in (index, index + 1))
            made["paceline"]["ended_rounds"] = rounds[first:end]
            yield event(made)
        if self.error:
            yield event({"error": {"message": self.error, "type": "server_error"}})
            return
        yield event({"choices": [choice("", chat) | {"finish_reason": "stop"}]})
        details = {"seed": asked["seed"], "rounds": rounds}
        yield event({"choices": [], "usage": {}, "metrics": speculation(rounds), "paceline": details})
        yield "data: [DONE]\n\n"


def event(data: Json) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def chunk(tokens: Sequence[ScriptedToken], *, chat: bool, off: bool) -> Json:
    """Some tokens in the shape of their API."""
    text = "".join(token.text for token in tokens)
    ends = [len("".join(token.text for token in tokens[: i + 1])) for i in range(len(tokens))]
    row: dict[str, Any]
    if chat:
        top = [{"token": " other", "logprob": -2.0}]
        row = {"content": [{"token": t.text, "logprob": LOGPROB, "top_logprobs": top} for t in tokens]}
    else:
        top_logprobs = [{token.text: LOGPROB, " other": -2.0} for token in tokens]
        row = {"token_logprobs": [LOGPROB] * len(tokens), "top_logprobs": top_logprobs}
    return {
        "choices": [choice(text, chat) | {"logprobs": row}],
        "paceline": {
            "token_ids": [7 + i for i in range(len(tokens))],
            "provenance": ["target" if off else token.provenance for token in tokens],
            "text_ends": ends,
            "replaced": [t.replaced for t in tokens if t.provenance == "recovered" and not off],
        },
    }


def choice(text: str, chat: bool) -> Json:
    """A choice with some text."""
    return {"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """An app behind the gateway's own server; yields its address."""
    with on_port(app, head_timeout_s=30) as port:
        yield f"http://127.0.0.1:{port}"
