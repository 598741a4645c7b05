"""A request of Anthropic's Messages API as one of OpenAI's chat.

The order of blocks is kept. What has no place in OpenAI's shape and isn't refused: an error of a tool, which becomes
text that begins with "Error: ", and reasoning that only its own server can read, of which nothing is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.protocol.errors import InvalidInput, require
from paceline_gateway.dialects.anthropic_types import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from paceline_gateway.dialects.translation import PlacedMessage, Translated, translated
from paceline_gateway.http.shapes import join_text, without_nones

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking.type",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "tool_choice.function": "tool_choice",
}


def chat_of_messages(request: MessagesRequest, *, reasons: bool, switch: str | None = None) -> Translated:
    """The chat request that asks for the same.

    Args:
        request: as it came.
        reasons: whether the model writes reasoning.
        switch: the variable of its template that can leave reasoning out.

    Raises:
        InvalidInput: naming what OpenAI's chat can't say.
    """
    sampling = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "seed", "paceline")}
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if request.stream else {}
    further = without_nones(sampling | {"stop": request.stop_sequences or None})
    limit = {"max_completion_tokens": request.max_tokens}
    return _translated(request, {**further, **limit, **streamed}, reasons=reasons, switch=switch)


def prompt_of_messages(request: CountTokensRequest, *, reasons: bool, switch: str | None = None) -> Translated:
    """What of it makes the prompt. Raises as `chat_of_messages`."""
    return _translated(request, {}, reasons=reasons, switch=switch)


def _translated(
    request: CountTokensRequest, further: dict[str, Any], *, reasons: bool, switch: str | None
) -> Translated:
    last = request.messages[-1].role
    require(last != "assistant", "messages", f"…, {last}", "ended by a user's turn: prefill is not supported")
    system = [PlacedMessage({"role": "system", "content": join_text(request.system)}, {"": "system"})]
    turns = [turn for place, each in enumerate(request.messages) for turn in _turns(each, f"messages.{place}")]
    output = request.output_config
    schema = {"name": "answer", "schema": output.format.schema_} if output and output.format else None
    optional = {
        "model": request.model,
        "response_format": {"type": "json_schema", "json_schema": schema} if schema else None,
        "reasoning_effort": output.effort if output else None,
    }
    thinking = request.thinking.type if request.thinking else "adaptive"
    switched = {"chat_template_kwargs": {switch: thinking == "enabled"}} if switch and thinking != "adaptive" else {}
    unkept = not switch and thinking != "adaptive" and (thinking == "enabled") != reasons
    fields = {**without_nones(optional), **_tools(request.tools or (), request.tool_choice), **switched, **further}
    names = _NAMES | _tool_names(request.tools or ())
    return translated(fields, [*(system if request.system else []), *turns], names, ["thinking"] if unkept else [])


def _turns(message: AnthropicMessage, path: str) -> Iterable[PlacedMessage]:
    if isinstance(message.content, str):
        return [PlacedMessage({"role": message.role, "content": message.content}, {"": path})]
    if message.role == "assistant":
        return [_answer(message.content, path)]
    return list(_said(message.role, message.content, path))


def _said(role: str, blocks: Sequence[Block], path: str) -> Iterable[PlacedMessage]:
    """A turn that isn't the model's: results of calls are messages of their own."""
    texts: list[TextBlock] = []
    for place, block in enumerate(blocks):
        own = f"{path}.content.{place}"
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if not isinstance(block, ToolResultBlock) or role != "user":
            raise InvalidInput.of(f"{own}.type", block.type, f"none in a turn of {role}")
        yield from _as_parts(role, texts, path)
        texts = []
        mark = "Error: " if block.is_error else ""
        result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": mark + join_text(block.content)}
        yield PlacedMessage(result, {"": own, "tool_call_id": f"{own}.tool_use_id"})
    yield from _as_parts(role, texts, path)


def _as_parts(role: str, texts: Sequence[TextBlock], path: str) -> list[PlacedMessage]:
    content = [{"type": "text", "text": block.text} for block in texts]
    return [PlacedMessage({"role": role, "content": content}, {"": path})] if texts else []


def _answer(blocks: Sequence[Block], path: str) -> PlacedMessage:
    """An earlier answer: reasoning, text, calls, in this order, as templates write them."""
    order = [_rank(block, f"{path}.content.{place}") for place, block in enumerate(blocks)]
    require(order == sorted(order), f"{path}.content", [block.type for block in blocks], "thinking, text, tool_use")
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    called = any(isinstance(block, ToolUseBlock) for block in blocks)
    reasoning = {"reasoning_content": thoughts} if thoughts else {}
    answer = {"role": "assistant", "content": text if text or not called else None, **reasoning}
    placed = PlacedMessage(answer, {"": path})
    for place, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock):
            own = f"{path}.content.{place}"
            placed.add_call(_call(block), {"id": f"{own}.id", "function": own, "function.arguments": f"{own}.input"})
    return placed


def _rank(block: Block, field: str) -> int:
    kinds = ((ThinkingBlock, RedactedThinkingBlock), (TextBlock,), (ToolUseBlock,))
    rank = next((rank for rank, kind in enumerate(kinds) if isinstance(block, kind)), None)
    if rank is None:
        raise InvalidInput.of(f"{field}.type", block.type, "none in an assistant's turn")
    return rank


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tools(tools: Sequence[AnthropicTool], choice: AnthropicToolChoice | None) -> dict[str, Any]:
    listed = [{"type": "function", "function": _function(tool)} for tool in tools]
    if choice is None:
        return {"tools": listed} if listed else {}
    named = choice.type == "tool"
    require(named == (choice.name is not None), "tool_choice.name", choice.name, "given with the type tool alone")
    wanted: Any = {"type": "function", "function": {"name": choice.name}} if named else _CHOICES[choice.type]
    single = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {**({"tools": listed} if listed else {}), "tool_choice": wanted, **single}


def _function(tool: AnthropicTool) -> dict[str, Any]:
    optional = {"description": tool.description, "strict": tool.strict}
    return {"name": tool.name, "parameters": tool.input_schema, **without_nones(optional)}


def _tool_names(tools: Sequence[AnthropicTool]) -> dict[str, str]:
    functions = {f"tools.{place}.function": f"tools.{place}" for place in range(len(tools))}
    return functions | {f"{function}.parameters": f"{own}.input_schema" for function, own in functions.items()}
