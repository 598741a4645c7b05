"""What clients send by default, as it was recorded from them: their fields and shapes, in words of our own."""

from __future__ import annotations

from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
EPHEMERAL = {"type": "ephemeral"}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def written(role: str, words: str) -> dict[str, Any]:
    """An item of a response's input."""
    return {"role": role, "content": [{"type": "input_text", "text": words}]}


def parameters(draft: str = DRAFT_7, **properties: Any) -> dict[str, Any]:
    properties = properties or {"a": {"type": "string"}}
    closed = {"required": [*properties], "additionalProperties": False}
    return {"$schema": draft, "type": "object", "properties": properties, **closed}


def function(**more: Any) -> dict[str, Any]:
    return {"name": "look", "description": "Looks.", "parameters": parameters(), **more}


USER = {"role": "user", "content": "q"}
ASKED = {"model": "m", "messages": [USER]}
TOOL = {"type": "function", "function": function()}
LOOKED = {"name": "look", "arguments": "{}", "status": "completed"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": "x"}'}}
OBJECT = {"schema": parameters(), "strict": True, "name": "response"}
TITLE = parameters(title={"type": "string"})
CODING_AGENT: dict[str, Any] = {
    "model": "m", "max_tokens": 64_000, "stream": True,
    "messages": [
        {"role": "user", "content": [
            text("<reminder>Context.</reminder>"), text("Name three rivers.", cache_control=EPHEMERAL),
        ]},
        {"role": "system", "content": "Agents: one."},
    ],
    "system": [text("billing: version=1;"), text("You are an agent.", cache_control=EPHEMERAL)],
    "tools": [
        {
            "name": "Bash", "description": "Runs a command.",
            "input_schema": parameters(DRAFT_2020, command={"type": "string"}, timeout={"type": "number"}),
        },
        {
            "name": "Read", "description": "Reads a file.", "eager_input_streaming": True, "cache_control": EPHEMERAL,
            "input_schema": parameters(DRAFT_2020, path={"type": "string"}),
        },
    ],
    "metadata": {"user_id": '{"device_id":"x"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}  # fmt: skip
TITLES: dict[str, Any] = {
    "messages": [{"role": "user", "content": [text("<session>q</session>")]}], "tools": [],
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": TITLE}},
}  # fmt: skip
LITELLMS: dict[str, Any] = {"function_call": None, "provider_specific_fields": {"refusal": None}}
ITSELF = {"type": "message", "id": "msg_1"}
RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code": (f"{MESSAGES}?beta=true", CODING_AGENT),
    "Claude Code's titles": (f"{MESSAGES}?beta=true", CODING_AGENT | TITLES),
    "Codex without the provider's tools": (RESPONSES, {
        "model": "m", "stream": True, "tool_choice": "auto", "parallel_tool_calls": True, "store": False,
        "input": [
            ITSELF | written("developer", "You are a coding agent."), ITSELF | written("user", "Name three rivers."),
        ],
        "tools": [{"type": "function", **function(strict=False)}],
        "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k", "client_metadata": {"session_id": "k"},
    }),
    "AI SDK, responses": (RESPONSES, {
        "model": "m", "input": [{"role": "system", "content": "s"}, written("user", "q")],
        "tools": [{"type": "function", **function()}], "tool_choice": "auto",
    }),
    "AI SDK, an object": (CHAT, ASKED | {"response_format": {"type": "json_schema", "json_schema": OBJECT}}),
    "LangChain, names and a limit": (CHAT, {
        "model": "m", "max_completion_tokens": 60_000, "tools": [TOOL],
        "messages": [USER | {"name": "Ann"}, {"role": "assistant", "content": "a", "name": "bot"}, USER],
    }),
    "LiteLLM, a result with a name": (CHAT, {
        "model": "m", "tools": [TOOL], "user": "u", "metadata": {"a": "b"},
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}], **LITELLMS},
            {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "wet"},
        ],
    }),
    "instructor": (CHAT, ASKED | {"tools": [TOOL], "tool_choice": TOOL | {"function": {"name": "look"}}}),
    "an agent that sends its own answer back": (RESPONSES, {
        "input": [
            USER,
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", **LOOKED},
            {"type": "function_call_output", "call_id": "call_1", "output": "wet"},
        ],
        "include": [], "store": False,
    }),
}  # fmt: skip
