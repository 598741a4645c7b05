"""Errors in the request's own names: each field by its path there, whatever it was translated to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from paceline.protocol.errors import PacelineError
from paceline_gateway.http.errors import FAILURES, HttpError, as_http
from paceline_gateway.openai.types import ChatRequest, Chunk, GenerationFields

Names = Mapping[str, str]
"""Maps paths in our errors, or beginnings of paths, to the request's own."""

_FUNCTION_RULE = "(function_"
"""Stands in a target's message about a rule of `paceline_gateway.reply.call_grammar`, not of a format."""


def request_path(path: str, names: Names) -> str:
    """Return the request's own path for a path; the longest beginning that has a name counts."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        request_name = names.get(".".join(parts[:count]))
        if request_name is not None:
            return ".".join([request_name, *parts[count:]])
    return path


def in_own_names(error: HttpError | PacelineError, names: Names) -> HttpError:
    """Return the error as it is sent, `param` and message in the request's own names."""
    client_error = as_http(error)
    if client_error.param is None:
        return client_error
    is_function_rule = client_error.param == "lark" and _FUNCTION_RULE in client_error.message
    param = "tools" if is_function_rule else request_path(client_error.param, names)
    message = client_error.message
    if message.startswith(client_error.param):
        message = param + message.removeprefix(client_error.param)
    return replace(client_error, param=param, message=message)


async def with_own_names(chunks: AsyncGenerator[Chunk, None], names: Names) -> AsyncGenerator[Chunk, None]:
    """Yield the same chunks; an error is in the request's own names."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except FAILURES as error:
        raise in_own_names(error, names) from error


def request_names(body: GenerationFields) -> Names:
    """Return OpenAI's names of the fields in our errors."""
    names = dict[str, str]()
    if isinstance(body, ChatRequest):
        names["prompt"] = "messages"
        if body.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
    outputs, response_format = body.structured_outputs, body.response_format
    if outputs is None:
        source = "tools" if response_format is None or response_format.type == "text" else "response_format"
        return names | {"json_schema": source, "lark": source}
    schema = "json_object" if outputs.json_object else "json"
    lark = "choice" if outputs.choice is not None else "grammar"
    kinds = {"json_schema": schema, "regex": "regex", "lark": lark}
    return names | {kind: f"structured_outputs.{field}" for kind, field in kinds.items()}
