"""What is asked while faults fall, one form for each way in which rounds can run, and how it went, token by token."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.client import AsyncClient
from paceline.protocol.errors import PacelineError, PeerUnavailable
from paceline.protocol.generation import Finished, GenerateRequest, SpeculationSettings, Tokens
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.chaos import guest
from tests.chaos.shapes import GUEST, SHAPES

HANGS = "HANGS"
LEFT = "LEFT"
"""Ends that no service tells: the request did not end in time, and its client left it on purpose."""


@dataclass
class Ended:
    """How a request went. `error`: a typed error's reason, `HANGS`, `LEFT`, or what an HTTP client saw; empty: it has
    its text. Times are of `time.monotonic`; `times` those of every message with tokens."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Any, ...] = ()
    reason: str = ""
    error: str = ""
    message: str = ""
    begun: float = field(default_factory=time.monotonic)
    times: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def result(self) -> tuple[Any, ...]:
        """What must not change."""
        return self.token_ids, self.text, self.logprobs, self.reason


@dataclass(frozen=True)
class Manner:
    """How a client reads: its pause before each message, messages behind which it leaves, when it takes it for
    hung."""

    pause_s: float = 0.0
    leave_after: int | None = None
    patience_s: float = 60.0


async def ask(client: AsyncClient, request: GenerateRequest, manner: Manner) -> Ended:
    ended = Ended()
    try:
        async with asyncio.timeout(manner.patience_s):
            stream = client.stream(request)
            async for event in stream:
                _add(ended, event)
                if manner.leave_after is not None and len(ended.times) >= manner.leave_after:
                    await stream.aclose()
                    ended.error = LEFT
                    break
                await asyncio.sleep(manner.pause_s)
    except PacelineError as error:
        ended.error, ended.message = error.reason, error.message
    except TimeoutError:
        ended.error = HANGS
    ended.ended = time.monotonic()
    return ended


def _add(ended: Ended, event: object) -> None:
    if isinstance(event, Tokens):
        ended.times.append(time.monotonic())
        ended.token_ids += event.token_ids
        ended.text += event.text
        ended.logprobs += event.logprobs
    elif isinstance(event, Finished):
        ended.text += event.text
        ended.reason = event.reason.value


def recovered_s(at: float, ends: Sequence[Ended]) -> float | None:
    """Seconds from `at` until the last request that was under way had a token again; None: none had to wait."""
    waits = [min(later) - at for each in ends if each.begun < at and (later := [t for t in each.times if t > at])]
    return max(waits, default=None)


LENGTH = 48
VOCABULARY = 299
"""Without the end token."""
VARIANTS = 3
"""Requests of each form: their prompts differ, so that they go to different targets."""
WAIT_S = 30.0
"""A request that has not ended by then hangs: beyond every patience and restart of the cluster."""
MODEL = SpeculationSettings(drafter="model", num_draft_tokens=3)
FORMS: Mapping[str, Mapping[str, Any]] = {
    "model": {"speculation": MODEL},
    "tree": {"speculation": SpeculationSettings(drafter="model", tree_widths=(3, 2, 1))},
    "auto": {},
    "off": {"speculation": SpeculationSettings(off=True)},
    "ngram": {"speculation": SpeculationSettings(drafter="ngram", num_draft_tokens=4)},
    "logprobs": {"speculation": MODEL, "sampling": SamplingParams(temperature=0.9, logprobs=2)},
    "greedy": {"speculation": MODEL, "sampling": SamplingParams(temperature=0.0)},
    "stopping": {"speculation": MODEL, "stop_token_ids": tuple(range(0, VOCABULARY, 25))},
    "features": {"speculation": SpeculationSettings(drafter=guest.NAME, num_draft_tokens=3)},
    "rejection": {"speculation": MODEL, "acceptance": Acceptance.REJECTION},
    "block": {"speculation": MODEL, "acceptance": Acceptance.BLOCK},
}
LAW_ONLY = frozenset({"rejection", "block"})
"""Of these the text's law is promised, which other tests measure; here, its length."""
HTTP = "http"


@dataclass(frozen=True)
class Asked:
    """One request of a form; `HTTP` goes to the gateway."""

    form: str
    variant: int

    @property
    def request(self) -> GenerateRequest:
        """The request itself; of `HTTP` its gRPC twin."""
        source = random.Random(f"{self.form} {self.variant}")
        prompt = tuple(source.choices(range(VOCABULARY), k=source.choice([3, 40, 90])))
        made = GenerateRequest(
            token_ids=prompt,
            seed=source.randrange(1 << 32),
            max_new_tokens=LENGTH,
            ignore_eos=True,
            sampling=SamplingParams(temperature=0.8),
        )
        return replace(made, **FORMS.get(self.form, {}))


def all_requests(shape: str) -> list[Asked]:
    """Those that a cluster of this shape serves."""
    made = SHAPES[shape]
    forms = [form for form in FORMS if form != guest.NAME or GUEST in made.role_of_proxy]
    forms += [HTTP] if "gateway" in made.labels else []
    return [Asked(form, variant) for form in forms for variant in range(VARIANTS)]


def ask_http(address: str, asked: Asked, pause_s: float) -> Ended:
    """The same through the gateway, streamed; what a cut connection loses is lost there."""
    request, ended = asked.request, Ended()
    body = {
        "prompt": list(request.token_ids),
        "seed": request.seed,
        "max_tokens": request.max_new_tokens,
        "temperature": request.sampling.temperature,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(address, timeout=WAIT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            ended.error = _reason(response.read())
        else:
            _read_events(response, ended, pause_s)
    except TimeoutError:
        ended.error = HANGS
    except (OSError, http.client.HTTPException):
        ended.error = PeerUnavailable.reason
    finally:
        connection.close()
    ended.ended = time.monotonic()
    return ended


def _read_events(response: http.client.HTTPResponse, ended: Ended, pause_s: float) -> None:
    done = False
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        done = done or data == b"[DONE]"
        if data == b"[DONE]":
            continue
        time.sleep(pause_s)
        event = json.loads(data)
        if "error" in event:
            ended.error = str(event["error"]["code"])
            return
        for choice in event["choices"]:
            ended.times.append(time.monotonic())
            ended.text += choice["text"]
            ended.reason = choice["finish_reason"] or ended.reason
    if not done:
        ended.error = PeerUnavailable.reason


def _reason(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])
