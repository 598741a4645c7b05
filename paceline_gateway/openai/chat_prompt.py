"""A chat as the model reads it: functions, turns, and the grammar of the reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.models.prompts import PIECE_BYTES
from paceline.models.rendering import Turn, keys_and_strings
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.sampling import Grammar
from paceline_gateway.openai.template_fields import TemplateSettings
from paceline_gateway.openai.tools import ToolPlan
from paceline_gateway.openai.turns import template_turns
from paceline_gateway.openai.types import Message
from paceline_gateway.reply.deltas import ReplyParser
from paceline_gateway.reply.format import ReplyFormat, opens_reasoning
from paceline_gateway.reply.tokens import ReasoningTokens
from paceline_gateway.upstream.services import Services


@dataclass(frozen=True)
class ChatPrompt:
    """A chat's ids, up to where the answer begins, and how the answer is read.

    Attributes:
        in_reasoning: whether the template opened a span of reasoning.
        answer: the grammar of an answer that is no call; None: any text.
        ignored_fields: names of fields that the prompt leaves out.
    """

    token_ids: tuple[int, ...]
    tools: ToolPlan
    reply_format: ReplyFormat
    in_reasoning: bool
    answer: Grammar | None = None
    ignored_fields: frozenset[str] = frozenset()

    @property
    def parser(self) -> ReplyParser:
        """A new parser for one reply."""
        return self.tools.parser(self.reply_format, self.answer, in_reasoning=self.in_reasoning)

    def reasoning_tokens(self, tokenizer: Tokenizer) -> ReasoningTokens:
        """Build the counter of a reply's tokens of reasoning."""
        return ReasoningTokens(tokenizer, self.reply_format, in_reasoning=self.in_reasoning)

    @property
    def marker_tokens(self) -> Mapping[int, str]:
        """Special tokens whose text the parser must see, by id."""
        return self.reply_format.markers(calls=bool(self.tools.functions))

    def constrain(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the grammar of its calls and its answer.

        Raises:
            Unsupported: the model's format can't keep them.
        """
        grammar = self.tools.grammar(self.reply_format, self.answer, in_reasoning=self.in_reasoning)
        return replace(request, sampling=replace(request.sampling, grammar=grammar))


async def read_chat(
    services: Services,
    messages: Sequence[Message],
    tools: ToolPlan,
    max_length: int,
    settings: TemplateSettings,
) -> ChatPrompt:
    """Render a chat beside the event loop.

    Args:
        services: the process's.
        messages: in OpenAI's shape.
        tools: the functions of the request.
        max_length: the model's context length, in tokens.
        settings: the template's other variables.

    Raises:
        InvalidInput: more bytes than the context can hold, or a message that the template can't write.
        Unsupported: the model's template can't write calls, or the model has no template.
    """
    named_roles = services.named_roles if any(message.name for message in messages) else frozenset()

    def read() -> tuple[list[Turn], int, int]:
        turns = template_turns(messages, services.reply_format.calls, named_roles)
        size = _bytes("messages", turns) + _bytes("tools", tools.listing)
        return turns, size, len(keys_and_strings((turns, tools.listing))[0])

    argument_size = sum(len(call.function.arguments) for message in messages for call in message.tool_calls or ())
    turns, size, names = await services.prompts.run(read, PIECE_BYTES * len(messages) + argument_size)
    render = partial(services.tokenizer.render_turns, turns, tools.listing, settings.variables)
    ids = await services.prompts.read(render, size, max_length, "chat content bytes", names)
    in_reasoning = opens_reasoning(services.tokenizer, ids, services.reply_format.reasoning)
    pairs = zip(messages, turns, strict=True)
    drops_names = any(message.name and message.name != turn.get("name") for message, turn in pairs)
    ignored_fields = tools.ignored_fields | settings.ignored_fields | ({"messages.name"} if drops_names else set())
    return ChatPrompt(ids, tools, services.reply_format, in_reasoning, ignored_fields=ignored_fields)


def _bytes(field: str, parts: Sequence[Turn]) -> int:
    """Return the size of all texts in UTF-8, without keys and roles, which templates write in ways of their own."""
    _, strings = keys_and_strings([{**part, "role": ""} for part in parts])
    try:
        return sum(len(text.encode()) for text in strings)
    except UnicodeEncodeError as error:
        raise InvalidInput.of(field, error.object[error.start : error.end], "text in Unicode") from error
