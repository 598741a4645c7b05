"""Requests of Anthropic's Messages API, translated to OpenAI's chat.

Blocks keep their order. Two things have no place in OpenAI's shape and are not refused. An error of a tool becomes
text that begins with "Error: ". Reasoning that only its own server can read is left out.
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
from paceline_gateway.dialects.translation import ChatTranslation, MessageWithPaths, assemble_chat
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


def chat_of_messages(request: MessagesRequest, *, has_reasoning: bool, switch: str | None = None) -> ChatTranslation:
    """Translate a request.

    Args:
        request: the client's request.
        has_reasoning: whether the model writes reasoning.
        switch: the variable of its template that can switch reasoning off.

    Raises:
        InvalidInput: naming what OpenAI's chat can't say.
    """
    sampling = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "seed", "paceline")}
    stream_fields = {"stream": True, "stream_options": {"include_usage": True}} if request.stream else {}
    more_fields = without_nones(sampling | {"stop": request.stop_sequences or None})
    limit = {"max_completion_tokens": request.max_tokens}
    return _translation(
        request, {**more_fields, **limit, **stream_fields}, has_reasoning=has_reasoning, switch=switch
    )


def prompt_of_messages(
    request: CountTokensRequest, *, has_reasoning: bool, switch: str | None = None
) -> ChatTranslation:
    """Translate the fields that make the prompt. Raises as `chat_of_messages`."""
    return _translation(request, {}, has_reasoning=has_reasoning, switch=switch)


def _translation(
    request: CountTokensRequest, more_fields: dict[str, Any], *, has_reasoning: bool, switch: str | None
) -> ChatTranslation:
    last_role = request.messages[-1].role
    require(
        last_role != "assistant", "messages", f"…, {last_role}", "ended by a user's turn: prefill is not supported"
    )
    system = [MessageWithPaths({"role": "system", "content": join_text(request.system)}, {"": "system"})]
    turns = [turn for place, message in enumerate(request.messages) for turn in _turns(message, f"messages.{place}")]
    output = request.output_config
    schema = {"name": "answer", "schema": output.format.schema_} if output and output.format else None
    optional_fields = {
        "model": request.model,
        "response_format": {"type": "json_schema", "json_schema": schema} if schema else None,
        "reasoning_effort": output.effort if output else None,
    }
    thinking, ignored_fields = request.thinking.type if request.thinking else "adaptive", []
    fields = {**without_nones(optional_fields), **_tools(request.tools or (), request.tool_choice), **more_fields}
    if thinking != "adaptive" and switch:
        fields["chat_template_kwargs"] = {switch: thinking == "enabled"}
    elif thinking != "adaptive" and (thinking == "enabled") != has_reasoning:
        ignored_fields = ["thinking"]
    names = _NAMES | _tool_names(request.tools or ())
    return assemble_chat(fields, [*(system if request.system else []), *turns], names, ignored_fields)


def _turns(message: AnthropicMessage, path: str) -> Iterable[MessageWithPaths]:
    if isinstance(message.content, str):
        return [MessageWithPaths({"role": message.role, "content": message.content}, {"": path})]
    if message.role == "assistant":
        return [_answer(message.content, path)]
    return list(_turn_messages(message.role, message.content, path))


def _turn_messages(role: str, blocks: Sequence[Block], path: str) -> Iterable[MessageWithPaths]:
    """Yield the messages of a turn that isn't the model's; each tool result is a message of its own."""
    texts: list[TextBlock] = []
    for place, block in enumerate(blocks):
        block_path = f"{path}.content.{place}"
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if not isinstance(block, ToolResultBlock) or role != "user":
            raise InvalidInput.of(f"{block_path}.type", block.type, f"none in a turn of {role}")
        yield from _text_parts(role, texts, path)
        texts = []
        mark = "Error: " if block.is_error else ""
        output = {"role": "tool", "tool_call_id": block.tool_use_id, "content": mark + join_text(block.content)}
        yield MessageWithPaths(output, {"": block_path, "tool_call_id": f"{block_path}.tool_use_id"})
    yield from _text_parts(role, texts, path)


def _text_parts(role: str, texts: Sequence[TextBlock], path: str) -> list[MessageWithPaths]:
    content = [{"type": "text", "text": block.text} for block in texts]
    return [MessageWithPaths({"role": role, "content": content}, {"": path})] if texts else []


def _answer(blocks: Sequence[Block], path: str) -> MessageWithPaths:
    """Translate an earlier answer: reasoning, text, calls, in this order, as templates write them."""
    order = [_rank(block, f"{path}.content.{place}") for place, block in enumerate(blocks)]
    require(order == sorted(order), f"{path}.content", [block.type for block in blocks], "thinking, text, tool_use")
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    has_calls = any(isinstance(block, ToolUseBlock) for block in blocks)
    reasoning = {"reasoning_content": thoughts} if thoughts else {}
    answer = {"role": "assistant", "content": text if text or not has_calls else None, **reasoning}
    message = MessageWithPaths(answer, {"": path})
    for place, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock):
            block_path = f"{path}.content.{place}"
            paths = {"id": f"{block_path}.id", "function": block_path, "function.arguments": f"{block_path}.input"}
            message.add_call(_call(block), paths)
    return message


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
    tool_list = [{"type": "function", "function": _function(tool)} for tool in tools]
    if choice is None:
        return {"tools": tool_list} if tool_list else {}
    is_named = choice.type == "tool"
    require(is_named == (choice.name is not None), "tool_choice.name", choice.name, "given with the type tool alone")
    tool_choice: Any = {"type": "function", "function": {"name": choice.name}} if is_named else _CHOICES[choice.type]
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {**({"tools": tool_list} if tool_list else {}), "tool_choice": tool_choice, **parallel}


def _function(tool: AnthropicTool) -> dict[str, Any]:
    optional_fields = {"description": tool.description, "strict": tool.strict}
    return {"name": tool.name, "parameters": tool.input_schema, **without_nones(optional_fields)}


def _tool_names(tools: Sequence[AnthropicTool]) -> dict[str, str]:
    functions = {f"tools.{place}.function": f"tools.{place}" for place in range(len(tools))}
    return functions | {f"{function}.parameters": f"{path}.input_schema" for function, path in functions.items()}
