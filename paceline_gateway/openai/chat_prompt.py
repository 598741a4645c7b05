"""A chat as the model reads it: functions, turns, and what the reply is then held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.models.prompts import PIECE_BYTES
from paceline.models.tokenizer import Tokenizer
from paceline.models.turns import Turn, keys_and_strings
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
    """A chat's ids, ending where the answer begins, and how the answer is read.

    Attributes:
        in_reasoning: whether the template opened a span of reasoning.
        answer: the format of an answer that is no call; None: any.
        ignored: names of fields that the prompt has nothing of.
    """

    token_ids: tuple[int, ...]
    tools: ToolPlan
    reply_format: ReplyFormat
    in_reasoning: bool
    answer: Grammar | None = None
    ignored: frozenset[str] = frozenset()

    @property
    def parser(self) -> ReplyParser:
        """A new one for a reply."""
        return self.tools.parser(self.reply_format, self.answer, in_reasoning=self.in_reasoning)

    def reasoning_tokens(self, tokenizer: Tokenizer) -> ReasoningTokens:
        """What counts a reply's tokens of reasoning."""
        return ReasoningTokens(tokenizer, self.reply_format, in_reasoning=self.in_reasoning)

    @property
    def marker_tokens(self) -> Mapping[int, str]:
        """Special tokens whose text the parser must see, by id."""
        return self.reply_format.markers(calls=bool(self.tools.callable))

    def hold(self, request: GenerateRequest) -> GenerateRequest:
        """The request, its reply held to what was promised of calls and to its answer's format.

        Raises:
            Unsupported: they can't be kept.
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
        services: of this process.
        messages: in OpenAI's shape.
        tools: what may be called.
        max_length: the model's context length, in tokens.
        settings: what the template reads beside the chat.

    Raises:
        InvalidInput: more bytes than the context can hold, or what the template has no way to write.
        Unsupported: calls that the model's template can't write, or it has no chat template.
    """
    named_roles = services.named_roles if any(message.name for message in messages) else frozenset()

    def read() -> tuple[list[Turn], int, int]:
        turns = template_turns(messages, services.reply_format.calls, named_roles)
        size = _bytes("messages", turns) + _bytes("tools", tools.rendered)
        return turns, size, len(keys_and_strings((turns, tools.rendered))[0])

    written = sum(len(call.function.arguments) for message in messages for call in message.tool_calls or ())
    turns, size, names = await services.prompts.run(read, PIECE_BYTES * len(messages) + written)
    render = partial(services.tokenizer.render_turns, turns, tools.rendered, settings.variables)
    ids = await services.prompts.read(render, size, max_length, "chat content bytes", names)
    opened = opens_reasoning(services.tokenizer, ids, services.reply_format.reasoning)
    unnamed = any(
        message.name and message.name != turn.get("name") for message, turn in zip(messages, turns, strict=True)
    )
    ignored = tools.ignored | settings.ignored | ({"messages.name"} if unnamed else set())
    return ChatPrompt(ids, tools, services.reply_format, opened, ignored=ignored)


def _bytes(field: str, parts: Sequence[Turn]) -> int:
    """Size of the texts in UTF-8, without keys and roles, which templates write in their own way or leave out."""
    _, strings = keys_and_strings([{**part, "role": ""} for part in parts])
    try:
        return sum(len(text.encode()) for text in strings)
    except UnicodeEncodeError as error:
        raise InvalidInput.of(field, error.object[error.start : error.end], "text in Unicode") from error
