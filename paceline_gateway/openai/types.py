"""OpenAI's requests, with what vLLM's users add, as pydantic models; any other field is refused by name.

A field that takes one value alone (`Literal`) is accepted because that value changes nothing. A `Hint` is accepted
because no value of it would change a text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, Tag

from paceline.protocol.generation import MAX_MESSAGES
from paceline.protocol.sampling import MAX_TOP_LOGPROBS
from paceline_gateway.http.ignored_fields import Hint
from paceline_gateway.http.shapes import (
    TYPE_TAG,
    BoundedList,
    BoundedObject,
    Content,
    Prose,
    RequestShape,
    Text,
    TokenIds,
    join_text,
    one_of_types,
)

Chunk = dict[str, Any]
"""One chunk of a stream, as it is sent."""
MAX_CHOICES = 128
"""Most choices of one HTTP request, all prompts together."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` of `/v1/completions`."""


class StreamOptions(RequestShape):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: Hint = None
    continuous_usage_stats: Hint = None


class StructuredOutputs(RequestShape):
    """vLLM's way to ask for a formal language; exactly one is set."""

    json_: dict[Text, JsonValue] | Text | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: BoundedList[Text] | None = None
    grammar: Text | None = None


class JsonSchema(RequestShape):
    """The schema of `response_format`."""

    name: Text | None = None
    description: Prose | None = None
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
    """The fields that completions and chat have in common."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    max_tokens: int | None = None
    stop: Text | BoundedList[Text] | None = None
    stop_token_ids: BoundedList[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[Text, float], BoundedObject] | None = None
    bad_words: BoundedList[Text] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    paceline: PacelineOptions | None = None

    user: Hint = None
    metadata: Hint = None
    request_id: Hint = None
    priority: Hint = None
    store: Hint = None
    service_tier: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    prompt_cache_options: Hint = None
    cache_salt: Hint = None
    include_stop_str_in_output: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None


class CompletionRequest(GenerationFields):
    """`/v1/completions`."""

    prompt: Prose | BoundedList[Prose] | TokenIds | BoundedList[TokenIds]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool | None = None


class TextPart(RequestShape):
    """A piece of a message."""

    type: Literal["text"]
    text: Prose
    cache_control: Hint = None
    prompt_cache_breakpoint: Hint = None


class RefusalPart(RequestShape):
    """An earlier answer that was a refusal: text like any other."""

    type: Literal["refusal"]
    refusal: Prose

    @property
    def text(self) -> str:
        """What it says."""
        return self.refusal


MessagePart = Annotated[
    Annotated[TextPart, Tag("[text]")] | Annotated[RefusalPart, Tag("[refusal]")],
    TYPE_TAG,
    one_of_types("content part", "text", "refusal"),
]


class CalledFunction(RequestShape):
    """A function's name, and its arguments as JSON text."""

    name: Text
    arguments: Prose


class ToolCall(RequestShape):
    """A call in an earlier answer."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Hint = None
    cache_control: Hint = None
    provider_specific_fields: Hint = None
    extra_content: Hint = None


class PredictedContent(RequestShape):
    """The text that the answer will mostly be."""

    type: Literal["content"]
    content: Content[Annotated[TextPart, one_of_types("content part", "text")]]

    @property
    def text(self) -> str:
        """The whole prediction."""
        return join_text(self.content)


class Message(RequestShape):
    """One message of a chat; `paceline_gateway.openai.turns` reads what calls need."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content[MessagePart] | None = None
    refusal: Prose | None = None
    name: Text | None = None
    tool_calls: BoundedList[Annotated[ToolCall, one_of_types("call", "function", default="function")]] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Prose | None = None
    reasoning: Prose | None = None

    id: Hint = None
    annotations: Hint = None
    cache_control: Hint = None
    reasoning_details: Hint = None
    thinking_blocks: Hint = None
    provider_specific_fields: Hint = None

    @property
    def text(self) -> str:
        """The pieces of the content, joined, and a refusal behind them."""
        return join_text(self.content) + (self.refusal or "")


class TemplateFields(RequestShape):
    """The fields that set variables of a chat template; `template_fields` reads them."""

    verbosity: Literal["low", "medium", "high"] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: Annotated[dict[Text, Text | bool | int | float | None], BoundedObject] | None = None


class ChatRequest(TemplateFields, GenerationFields):
    """`/v1/chat/completions`."""

    messages: BoundedList[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: BoundedList[dict[Text, JsonValue]] | None = None
    tool_choice: Text | dict[Text, JsonValue] | None = None
    parallel_tool_calls: bool | None = None
    prediction: PredictedContent | None = None

    modalities: tuple[Literal["text"]] | None = Field(None, strict=False)
    functions: BoundedList[JsonValue] | None = Field(None, max_length=0)
    function_call: Literal["none", "auto"] | None = None
    include_reasoning: Literal[True] | None = None
    add_special_tokens: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None


class TokenizeRequest(TemplateFields):
    """`/tokenize`: a prompt or a chat."""

    model: Text | None = None
    prompt: Prose | None = None
    messages: BoundedList[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: Literal[True] | None = None


class DetokenizeRequest(RequestShape):
    """`/detokenize`."""

    model: Text | None = None
    tokens: TokenIds
