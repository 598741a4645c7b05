"""OpenAI's Responses API as pydantic models: what isn't a field here is refused by name.

A field that takes one value alone (`Literal`, `None`) is accepted because that value changes nothing. Nothing is
stored, so nothing can be referred to later.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from gateway.openai_types import Few, RequestShape, Several, Text

Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(RequestShape):
    """A piece of a message; images, audio and files have other types."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Several[JsonValue] | None = Field(None, max_length=0)
    logprobs: Several[JsonValue] | None = Field(None, max_length=0)


class InputMessage(RequestShape):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Several[InputPart]
    id: Text | None = None
    status: Status | None = None
    phase: None = None


class FunctionCallItem(RequestShape):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    id: Text | None = None
    status: Status | None = None


class FunctionCallOutputItem(RequestShape):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Several[InputPart]
    id: Text | None = None
    status: Status | None = None


class ReasoningPart(RequestShape):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(RequestShape):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    id: Text | None = None
    summary: list[JsonValue] = Field(default_factory=list, max_length=0)
    content: Several[ReasoningPart] | None = None
    encrypted_content: None = None
    status: Status | None = None


InputItem = InputMessage | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class ResponsesTool(RequestShape):
    """A function that may be called. Tools that OpenAI's own servers run have other types."""

    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: dict[Text, JsonValue] | None = None
    strict: bool | None = None


class ResponsesToolChoice(RequestShape):
    """A function that must be called."""

    type: Literal["function"]
    name: Text


class TextFormat(RequestShape):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: dict[Text, JsonValue] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestShape):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(RequestShape):
    """How the model reasons."""

    effort: Text | None = None
    summary: None = None


class ResponsesStreamOptions(RequestShape):
    """How events are sent."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(RequestShape):
    """`/v1/responses`, with our own `seed` and `paceline`."""

    model: Text | None = None
    input: Text | Several[InputItem]
    instructions: Text | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Several[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[Text, Text], Few] | None = None
    paceline: dict[Text, JsonValue] | None = None

    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    include: Several[JsonValue] | None = Field(None, max_length=0)
    top_logprobs: Literal[0] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
