"""Errors in the names that the request has: a field's own path, whatever it was translated to on its way."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from paceline.protocol.errors import PacelineError
from paceline_gateway.http.errors import HttpError, http_error
from paceline_gateway.openai.types import ChatRequest, Chunk, GenerationFields

Names = Mapping[str, str]
"""Paths as errors have them, whole or their beginnings, with the request's own."""

_OF_A_FUNCTION = "(function_"
"""In what a target says of a rule of `paceline_gateway.reply.call_grammar`, beside which a format's may stand."""


def own_name(path: str, names: Names) -> str:
    """The request's own path for one: of its beginnings the longest that has a name counts."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        own = names.get(".".join(parts[:count]))
        if own is not None:
            return ".".join([own, *parts[count:]])
    return path


def in_own_names(error: HttpError | PacelineError, names: Names) -> HttpError:
    """The error as it is sent, `param` and message in the request's own names."""
    shown = error if isinstance(error, HttpError) else http_error(error)
    if shown.param is None:
        return shown
    of_a_function = shown.param == "lark" and _OF_A_FUNCTION in shown.message
    own = "tools" if of_a_function else own_name(shown.param, names)
    message = shown.message
    if message.startswith(shown.param):
        message = own + message.removeprefix(shown.param)
    return replace(shown, param=own, message=message)


async def told_in_own_names(made: AsyncGenerator[Chunk, None], names: Names) -> AsyncGenerator[Chunk, None]:
    """The same chunks; an error is in the request's own names."""
    try:
        async with aclosing(made) as chunks:
            async for chunk in chunks:
                yield chunk
    except (HttpError, PacelineError) as error:
        raise in_own_names(error, names) from error


def request_names(body: GenerationFields) -> Names:
    """What OpenAI's requests call what errors of ours name."""
    names = dict[str, str]()
    if isinstance(body, ChatRequest):
        names["prompt"] = "messages"
        if body.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
    outputs, wanted = body.structured_outputs, body.response_format
    if outputs is None:
        held = "tools" if wanted is None or wanted.type == "text" else "response_format"
        return names | {"json_schema": held, "lark": held}
    schema = "json_object" if outputs.json_object else "json"
    lark = "choice" if outputs.choice is not None else "grammar"
    kinds = {"json_schema": schema, "regex": "regex", "lark": lark}
    return names | {kind: f"structured_outputs.{field}" for kind, field in kinds.items()}
