"""Anthropic's Messages API as pydantic models; any other field is refused by name.

A field that takes one value alone (`Literal`) is accepted because that value changes nothing. A `Hint` is accepted
because no value of it would change a text.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, JsonValue, Tag

from paceline_gateway.http.ignored_fields import Hint
from paceline_gateway.http.shapes import TYPE_TAG, BoundedList, Content, Prose, RequestShape, Text, one_of_types


class _Cacheable(RequestShape):
    cache_control: Hint = None


class TextBlock(_Cacheable):
    """Text."""

    type: Literal["text"]
    text: Prose
    citations: Hint = None


class ThinkingBlock(RequestShape):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Prose
    signature: Prose | None = None


class RedactedThinkingBlock(RequestShape):
    """Reasoning of an earlier answer that its server alone can read."""

    type: Literal["redacted_thinking"]
    data: Hint = None


class ToolUseBlock(_Cacheable):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[Text, JsonValue]
    caller: Hint = None


TextAlone = Annotated[TextBlock, one_of_types("content block", "text")]


class ToolResultBlock(_Cacheable):
    """The output of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Content[TextAlone] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")],
    TYPE_TAG,
    one_of_types("content block", "text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


class AnthropicMessage(RequestShape):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Content[Block]


class AnthropicTool(_Cacheable):
    """A function that may be called. Tools that Anthropic's own servers run have other types."""

    name: Text
    type: Literal["custom"] | None = None
    description: Prose | None = None
    input_schema: dict[Text, JsonValue]
    strict: bool | None = None
    eager_input_streaming: Hint = None
    defer_loading: Literal[False] | None = None
    allowed_callers: BoundedList[Literal["direct"]] | None = None


class AnthropicToolChoice(RequestShape):
    """Which tools must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestShape):
    """Whether the model reasons, where its template has a switch for it; how much is left to the model."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Hint = None
    display: Hint = None
    block_binding: Hint = None


class JsonOutput(RequestShape):
    """The format of a JSON answer."""

    type: Literal["json_schema"]
    schema_: dict[Text, JsonValue] = Field(alias="schema")


class OutputConfig(RequestShape):
    """What the answer must be."""

    format: JsonOutput | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    task_budget: Hint = None


class CountTokensRequest(_Cacheable):
    """`/v1/messages/count_tokens`."""

    model: Text | None = None
    messages: BoundedList[AnthropicMessage] = Field(min_length=1)
    system: Content[TextAlone] | None = None
    tools: BoundedList[Annotated[AnthropicTool, one_of_types("tool", "custom", default="custom")]] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    mcp_servers: BoundedList[JsonValue] | None = Field(None, max_length=0)
    fallbacks: BoundedList[JsonValue] | None = Field(None, max_length=0)
    betas: Hint = None
    context_management: Hint = None
    speed: Hint = None
    user_profile_id: Hint = None
    workspace_id: Hint = None


class AnthropicErrorFields(BaseModel):
    """The fields of an error."""

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
    stop_sequences: BoundedList[Text] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    paceline: dict[Text, JsonValue] | None = None

    metadata: Hint = None
    service_tier: Hint = None
    inference_geo: Hint = None
    diagnostics: Hint = None
    billing_policy: Hint = None
