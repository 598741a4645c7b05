"""Anthropic's Messages API as pydantic models: what isn't a field here is refused by name.

A field that takes one value alone (`Literal`) is accepted because that value changes nothing; what asks for a cache
is, too, since caching changes no text.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, JsonValue

from gateway.openai_types import RequestShape, Several, Text


class _Cacheable(RequestShape):
    cache_control: dict[Text, JsonValue] | None = None


class TextBlock(_Cacheable):
    """Text."""

    type: Literal["text"]
    text: Text
    citations: Several[JsonValue] | None = Field(None, max_length=0)


class ThinkingBlock(RequestShape):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUseBlock(_Cacheable):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[Text, JsonValue]
    caller: dict[Text, JsonValue] | None = None


class ToolResultBlock(_Cacheable):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Several[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class AnthropicMessage(RequestShape):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Text | Several[Block]


class AnthropicTool(_Cacheable):
    """A function that may be called. Tools that Anthropic's own servers run have other types."""

    name: Text
    type: Literal["custom"] | None = None
    description: Text | None = None
    input_schema: dict[Text, JsonValue]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None


class AnthropicToolChoice(RequestShape):
    """Which tools must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestShape):
    """Whether the model reasons. It decides itself how much: a budget can't be kept."""

    type: Literal["adaptive", "disabled"]
    display: Literal["summarized"] | None = None


class JsonOutput(RequestShape):
    """The format of a JSON answer."""

    type: Literal["json_schema"]
    schema_: dict[Text, JsonValue] = Field(alias="schema")


class OutputConfig(RequestShape):
    """What the answer must be."""

    format: JsonOutput | None = None


class AnthropicMetadata(RequestShape):
    """Who asks."""

    user_id: Text | None = None


class CountTokensRequest(_Cacheable):
    """`/v1/messages/count_tokens`."""

    model: Text
    messages: Several[AnthropicMessage] = Field(min_length=1)
    system: Text | Several[TextBlock] | None = None
    tools: Several[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class AnthropicErrorFields(BaseModel):
    """What is said of an error."""

    type: str
    message: str


class AnthropicErrorReply(BaseModel):
    """The body of an error."""

    type: Literal["error"]
    error: AnthropicErrorFields


class MessagesRequest(CountTokensRequest):
    """`/v1/messages`, with our own `seed` and `paceline`."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: Several[Text] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard"] | None = None
    seed: int | None = None
    paceline: dict[Text, JsonValue] | None = None
