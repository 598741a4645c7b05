"""A request of Anthropic's Messages API as one of OpenAI's chat.

The order of blocks is kept. What has no place in OpenAI's shape and isn't refused: an error of a tool, which becomes
text that begins with "Error: ".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.anthropic_types import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from gateway.openai_types import joined_text
from gateway.unsupported import unsupported
from paceline.protocol.errors import InvalidInput, require

THINKING_SWITCH = "enable_thinking"
"""What templates read that can leave reasoning out: Qwen's, SmolLM3's, GLM's."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_messages(request: MessagesRequest, *, reasons: bool, switchable: bool = False) -> dict[str, Any]:
    """The chat request that asks for the same.

    Args:
        request: as it came.
        reasons: whether the model writes reasoning.
        switchable: whether its template can switch that off (`THINKING_SWITCH`).

    Raises:
        InvalidInput, Unsupported: naming what OpenAI's chat can't say.
    """
    sampling = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "seed", "paceline")}
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if request.stream else {}
    user = request.metadata.user_id if request.metadata else None
    return {
        **prompt_of_messages(request, reasons=reasons, switchable=switchable),
        **_given(sampling | {"stop": request.stop_sequences or None, "user": user}),
        "max_completion_tokens": request.max_tokens,
        **streamed,
    }


def prompt_of_messages(request: CountTokensRequest, *, reasons: bool, switchable: bool = False) -> dict[str, Any]:
    """What of it makes the prompt. Raises as `chat_of_messages`."""
    off = reasons and request.thinking is not None and request.thinking.type == "disabled"
    if off and not switchable:
        raise unsupported("thinking.type", "disabled is not supported, the model decides itself whether it reasons")
    last = request.messages[-1].role
    require(last != "assistant", "messages", f"…, {last}", "ended by a user's turn: prefill is not supported")
    system = [{"role": "system", "content": joined_text(request.system)}] if request.system else []
    turns = [turn for place, each in enumerate(request.messages) for turn in _turns(each, f"messages.{place}")]
    wanted = request.output_config.format if request.output_config else None
    schema = {"name": "answer", "schema": wanted.schema_} if wanted else None
    return {
        "model": request.model,
        "messages": [*system, *turns],
        **({"response_format": {"type": "json_schema", "json_schema": schema}} if schema else {}),
        **_tools(request.tools or (), request.tool_choice),
        **({"chat_template_kwargs": {THINKING_SWITCH: False}} if off else {}),
    }


def _turns(message: AnthropicMessage, field: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_answer(message.content, field)]
    return list(_said(message.role, message.content, field))


def _said(role: str, blocks: Sequence[Block], field: str) -> Iterable[dict[str, Any]]:
    """A turn that isn't the model's: results of calls are messages of their own."""
    texts: list[TextBlock] = []
    for place, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if not isinstance(block, ToolResultBlock) or role != "user":
            raise InvalidInput.of(f"{field}.content.{place}.type", block.type, f"none in a turn of {role}")
        yield from _as_parts(role, texts)
        texts = []
        mark = "Error: " if block.is_error else ""
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": mark + joined_text(block.content)}
    yield from _as_parts(role, texts)


def _as_parts(role: str, texts: Sequence[TextBlock]) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": block.text} for block in texts]}] if texts else []


def _answer(blocks: Sequence[Block], field: str) -> dict[str, Any]:
    """An earlier answer: reasoning, text, calls, in this order, as templates write them."""
    order = [_rank(block, f"{field}.content.{place}") for place, block in enumerate(blocks)]
    require(order == sorted(order), f"{field}.content", [block.type for block in blocks], "thinking, text, tool_use")
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    optional = {"reasoning_content": thoughts or None, "tool_calls": calls or None}
    return {"role": "assistant", "content": text if text or not calls else None, **_given(optional)}


def _rank(block: Block, field: str) -> int:
    kinds = (ThinkingBlock, TextBlock, ToolUseBlock)
    if not isinstance(block, kinds):
        raise InvalidInput.of(f"{field}.type", block.type, "none in an assistant's turn")
    return next(rank for rank, kind in enumerate(kinds) if isinstance(block, kind))


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
    return {"name": tool.name, "parameters": tool.input_schema, **_given(optional)}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
