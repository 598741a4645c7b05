"""A coordinator whose model does as it is told: it writes what the user's message quotes, one quote a turn.

`Say «<tool_call>…</tool_call>», then «The sum is {result}.»` makes a call, and a text of its result. So what a client
does with a call can be seen at the client, whatever it sends beside the message.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from coordinator.prepare import ServedModel, prepare
from paceline.models.tokenizer import TransformersTokenizer
from paceline.protocol import codec
from paceline.protocol.generation import FinishReason, GenerateEvent, ModelDescription, Started
from paceline.protocol.handshake import Fingerprint
from paceline.rpc.statuses import typed_errors
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import generation_service_pb2_grpc as pb_grpc
from tests.gateway.canned import written
from tests.gateway.templates import HERMES, templated
from tests.services.harness import serving

NAME = "obedient"
CONTEXT = 1 << 20
"""Its tokens are bytes."""
UNASKED = "Yes."
"""What it says where nothing is quoted."""
_QUOTE = re.compile("«(.*?)»", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def reply(prompt: str) -> str:
    """What it writes behind a rendered chat: of the quotes of the last turn that has any, that of this turn."""
    asked, _, since = prompt.rpartition("»")
    quotes = _QUOTE.findall(f"{asked.rpartition('<s>user')[2]}»")
    results = _RESULT.findall(since)
    if not quotes:
        return UNASKED
    written: str = quotes[min(len(results), len(quotes) - 1)]
    return written.replace("{result}", results[-1] if results else "")


class ObedientCoordinator(pb_grpc.GenerationServiceServicer):
    """Refuses what a coordinator refuses before a target is asked."""

    def __init__(self, tokenizer: TransformersTokenizer) -> None:
        self._tokenizer = tokenizer
        self._served = ServedModel(NAME, tokenizer, CONTEXT, ("auto",))

    @typed_errors
    async def DescribeModels(
        self, request: pb.DescribeModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeModelsResponse:
        """One model."""
        fingerprint = Fingerprint(NAME, "", self._tokenizer.vocab_size)
        described = ModelDescription(NAME, fingerprint, Fingerprint(), CONTEXT, ("auto",), True, False)
        return pb.DescribeModelsResponse(models=[codec.encode_model_description(described)])

    @typed_errors
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Write the reply, a token at a time."""
        async for event in self._events(request):
            await context.write(codec.encode_generate_event(event))

    async def _events(self, request: pb.GenerateRequest) -> AsyncIterator[GenerateEvent]:
        task = prepare(codec.decode_generate_request(request), self._served, deadline=None)
        yield Started(7, task.prompt, NAME)
        inner = self._tokenizer.inner
        ids = inner.encode(reply(str(inner.decode([*task.prompt]))), add_special_tokens=False)
        room = task.max_length - len(task.prompt)
        ended = FinishReason.LENGTH if len(ids) > room else FinishReason.STOP
        for event in written(self._tokenizer, ids[:room], task.prompt, task.stop, ended):
            yield event


@contextmanager
def obedient_coordinator(folder: Path) -> Iterator[str]:
    """Serve until the context ends; yields HOST:PORT. The folder gets what the gateway needs of the model."""
    tokenizer = templated(HERMES)
    tokenizer.inner.save_pretrained(folder)
    started: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.new_event_loop()
    ends = asyncio.Event()

    async def serve() -> None:
        servicer = ObedientCoordinator(tokenizer)
        async with serving(partial(pb_grpc.add_GenerationServiceServicer_to_server, servicer)) as address:
            await started.put(address)
            await ends.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(started.get(), loop).result(20)
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join()
        loop.close()
