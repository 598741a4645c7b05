"""OpenAI's Responses API as pydantic models; any other field is refused by name.

A field that takes one value alone (`Literal`) is accepted because that value changes nothing. A `Hint` is accepted
because no value of it would change a text. Nothing is stored, so nothing can be referred to later.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, Tag

from paceline_gateway.http.ignored_fields import HINT_MARK, Hint
from paceline_gateway.http.shapes import (
    TYPE_TAG,
    BoundedList,
    BoundedObject,
    Content,
    Either,
    Prose,
    RequestShape,
    Text,
    one_of_types,
)
from paceline_gateway.openai.types import RefusalPart

Status = Literal["in_progress", "completed", "incomplete"]
IncludeName = Literal[
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]
"""Optional parts of a reply, which none of ours has."""


class _AnswerItem(RequestShape):
    """The fields that items of earlier answers have in common."""

    id: Text | None = None
    status: Status | None = None


class InputPart(RequestShape):
    """A piece of a message; images, audio and files have other types."""

    type: Literal["input_text", "output_text", "text"]
    text: Prose
    annotations: Hint = None
    logprobs: Hint = None
    prompt_cache_breakpoint: Hint = None


Part = Annotated[
    Annotated[InputPart, Tag("[input_text]")]
    | Annotated[InputPart, Tag("[output_text]")]
    | Annotated[InputPart, Tag("[text]")]
    | Annotated[RefusalPart, Tag("[refusal]")],
    TYPE_TAG,
    one_of_types("content part", "input_text", "output_text", "text", "refusal"),
]


class InputMessage(_AnswerItem):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content[Part]
    phase: Hint = None


class FunctionCallItem(_AnswerItem):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Prose
    caller: Hint = None


class FunctionCallOutputItem(_AnswerItem):
    """The output of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content[Part]
    caller: Hint = None
    name: Hint = None


class ReasoningPart(RequestShape):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "text"]
    text: Prose


class ReasoningItem(_AnswerItem):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: BoundedList[Annotated[ReasoningPart, one_of_types("content part", "reasoning_text", "text")]] | None = (
        None
    )
    summary: Hint = None
    encrypted_content: Hint = None


InputItem = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[FunctionCallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    TYPE_TAG,
    one_of_types("item", "message", "function_call", "function_call_output", "reasoning", default="message"),
]


Choice = Literal["none", "auto", "required"]


class ResponsesTool(RequestShape):
    """A function that may be called. Tools that OpenAI's own servers run have other types."""

    type: Literal["function"]
    name: Text
    description: Prose | None = None
    parameters: dict[Text, JsonValue] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: BoundedList[Literal["direct"]] | None = None


class ResponsesToolChoice(RequestShape):
    """A function that must be called."""

    type: Literal["function"]
    name: Text


class TextFormat(RequestShape):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Prose | None = None
    schema_: dict[Text, JsonValue] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestShape):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(RequestShape):
    """How the model reasons."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Hint = None
    generate_summary: Hint = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesStreamOptions(RequestShape):
    """How events are sent."""

    include_obfuscation: Hint = None


class ResponsesRequest(RequestShape):
    """`/v1/responses`, with our own `seed` and `paceline`."""

    model: Text | None = None
    input: Content[InputItem]
    instructions: Prose | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: BoundedList[Annotated[ResponsesTool, one_of_types("tool", "function")]] | None = None
    tool_choice: Either[Choice, Annotated[ResponsesToolChoice, one_of_types("tool choice", "function")]] | None = None
    parallel_tool_calls: bool | None = None
    paceline: dict[Text, JsonValue] | None = None

    include: Annotated[BoundedList[IncludeName] | None, HINT_MARK] = None
    metadata: Annotated[dict[Text, Text] | None, BoundedObject, HINT_MARK] = None
    top_logprobs: Literal[0] | None = None
    background: Literal[False] | None = None
    user: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    prompt_cache_options: Hint = None
    service_tier: Hint = None
    truncation: Hint = None
    store: Hint = None
    max_tool_calls: Hint = None
    client_metadata: Hint = None
