"""OpenAI's requests, with what vLLM's users add, as pydantic models: what isn't a field here is refused by name.

A field that takes one value alone (`Literal`) is accepted because that value changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from paceline.protocol.generation import MAX_MESSAGES
from paceline.protocol.sampling import MAX_TOP_LOGPROBS

MAX_CHOICES = 128
"""Most choices of one HTTP request, all prompts together."""
DEFAULT_COMPLETION_TOKENS = 16
"""Of `/v1/completions`, as OpenAI has it."""


MAX_FIELDS = 1024
"""Of one object. Each that is wrong is an error of its own, and a body has room for half a million."""

Item = TypeVar("Item")
Several = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item is its only error: a body has room for a million."""


def _few_fields(values: object) -> object:
    if isinstance(values, dict) and len(values) > MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", "must have at most {limit} fields", {"limit": MAX_FIELDS})
    return values


Few = BeforeValidator(_few_fields)


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "must be text that UTF-8 can hold, without half of a character"
        raise PydanticCustomError("lone_surrogate", message) from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
"""JSON's escapes can name halves of characters, which no tokenizer can read."""


class RequestShape(BaseModel):
    """What every request and its parts keep: what isn't a field is refused, and JSON's types are meant."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    _has_few_fields = model_validator(mode="before")(staticmethod(_few_fields))


class StreamOptions(RequestShape):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


class StructuredOutputs(RequestShape):
    """vLLM's way to ask for a formal language; exactly one is set."""

    json_: dict[Text, JsonValue] | Text | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Several[Text] | None = None
    grammar: Text | None = None


class JsonSchema(RequestShape):
    """The schema of `response_format`."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[Text, JsonValue] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestShape):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class PacelineOptions(RequestShape):
    """What only Paceline has: how to speculate, and what to tell of it."""

    drafter: Text | None = None
    num_draft_tokens: int | None = None
    acceptance: Literal["coupled", "rejection", "block"] | None = None
    off: bool | None = None
    explain: bool | None = None
    rounds: bool | None = None


class GenerationFields(RequestShape):
    """What completions and chat have in common."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    max_tokens: int | None = None
    stop: Text | Several[Text] | None = None
    stop_token_ids: Several[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[Text, float], Few] | None = None
    bad_words: Several[Text] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    paceline: PacelineOptions | None = None

    user: Text | None = None
    metadata: Annotated[dict[Text, Text], Few] | None = None
    request_id: Text | None = None
    priority: Literal[0] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None


class CompletionRequest(GenerationFields):
    """`/v1/completions`."""

    prompt: Text | Several[Text] | Several[int] | Several[Several[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool | None = None


class TextPart(RequestShape):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class TextPiece(Protocol):
    """A part of a content, of whichever API."""

    @property
    def text(self) -> str:
        """What it says."""


def joined_text(content: str | Sequence[TextPiece] | None) -> str:
    """A content's text: its pieces joined, nothing between them."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(piece.text for piece in content)


class PredictedContent(RequestShape):
    """What the answer is expected to be in large part."""

    type: Literal["content"]
    content: Text | Several[TextPart]

    @property
    def text(self) -> str:
        """All of it."""
        return joined_text(self.content)


class Message(RequestShape):
    """One message of a chat; `gateway.turns` reads what calls need."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Several[TextPart] | None = None
    tool_calls: Several[dict[Text, JsonValue]] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None

    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Several[Any] | None = Field(None, max_length=0)

    @property
    def text(self) -> str:
        """The content's pieces joined."""
        return joined_text(self.content)


class TemplateFields(RequestShape):
    """What a chat template may read beside the chat."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: Annotated[dict[Text, Text | bool | int | float | None], Few] | None = None


class ChatRequest(TemplateFields, GenerationFields):
    """`/v1/chat/completions`."""

    messages: Several[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Several[dict[Text, JsonValue]] | None = None
    tool_choice: Text | dict[Text, JsonValue] | None = None
    parallel_tool_calls: bool | None = None
    prediction: PredictedContent | None = None

    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: tuple[Literal["text"]] | None = Field(None, strict=False)
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None


class TokenizeRequest(TemplateFields):
    """`/tokenize`: a prompt or a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Several[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: Literal[True] | None = None


class DetokenizeRequest(RequestShape):
    """`/detokenize`."""

    model: Text | None = None
    tokens: Several[int]
