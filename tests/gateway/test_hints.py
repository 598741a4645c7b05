"""Fields that can't change a text are taken, ignored and named; what would change it is refused by name."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import pytest

from tests.gateway.canned import serving
from tests.gateway.templates import HERMES, OPENED, PLAIN

USER = {"role": "user", "content": "q"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS = "/v1/completions"
COUNT = "/v1/messages/count_tokens"
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
PLAINLY: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "seed": 1},
    COMPLETIONS: {"prompt": "q", "seed": 1},
    MESSAGES: {"messages": [USER], "max_tokens": 9, "seed": 1},
    RESPONSES: {"input": "q", "seed": 1},
}
"""Without a model: the one that is served."""
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
MARKED = {"type": "text", "text": "q", "cache_control": EPHEMERAL}
BLOCKS = [{"role": "user", "content": [MARKED]}]
TO_CHAT: dict[str, Any] = {
    "user": "x", "safety_identifier": "x", "prompt_cache_key": "x", "prompt_cache_retention": "x", "priority": 3,
    "service_tier": "flex", "store": True, "metadata": {"a": "b"}, "request_id": "r",
    "reasoning_effort": "high", "verbosity": "low",
}  # fmt: skip
TO_CLAUDE: dict[str, Any] = {
    "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": EPHEMERAL, "betas": ["b"], "speed": "fast",
    "inference_geo": "eu", "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
}  # fmt: skip
TO_RESPONSES: dict[str, Any] = {
    "store": True, "truncation": "auto", "max_tool_calls": 3, "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"}, "service_tier": "priority", "client_metadata": {"a": "b"},
}  # fmt: skip
NULLS: dict[str, Any] = dict.fromkeys(("functions", "function_call", "audio", "unheard_of", "stop"))
EMPTY: dict[str, Any] = {
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "none",
}
HINTS: list[tuple[str, dict[str, Any], list[str]]] = [
    (CHAT, TO_CHAT, [*TO_CHAT]),
    (CHAT, {"messages": [BLOCKS[0] | {"name": "Ann"}]}, ["messages.content.cache_control", "messages.name"]),
    (CHAT, {"messages": [{**USER, "refusal": None, "unheard_of": None}], **NULLS, **EMPTY}, []),
    (COMPLETIONS, {"user": "u", "metadata": {}, "store": False, "best_of": None}, ["store", "user"]),
    (MESSAGES, {"messages": BLOCKS, **TO_CLAUDE}, ["messages.content.cache_control", *TO_CLAUDE]),
    (MESSAGES, {"output_config": {"effort": "max"}}, ["output_config.effort"]),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking", "thinking.budget_tokens"]),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "container": None, "mcp_servers": []}, []),
    (RESPONSES, TO_RESPONSES, [*TO_RESPONSES]),
    (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, ["reasoning.effort", "reasoning.summary"]),
    (RESPONSES, {"text": {"verbosity": "low"}, "background": False}, ["text.verbosity"]),
    (RESPONSES, dict.fromkeys(("previous_response_id", "conversation", "prompt", "stream_options")), []),
]


async def test_what_can_t_change_a_text_is_taken_and_named() -> None:
    async with serving(PLAIN, "Yes.") as served:
        for path, fields, names in HINTS:
            served.canned.asked.clear()
            bodies = [PLAINLY[path] | each for each in ({}, fields, fields | {"stream": True}, {"stream": True})]
            answers = [await served.http.post(path, json=body) for body in bodies]
            assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
            notes = [answer.headers.get("x-paceline-ignored", "") for answer in answers]
            assert notes == ["", *[", ".join(sorted(names))] * 2, ""]
            first, *others = served.canned.asked
            assert others == [first] * 3, "what the coordinator is asked is the same"


async def test_fields_of_further_routes_are_named_too() -> None:
    async with serving(HERMES, "Yes.") as served:
        marked = {"name": "add", "input_schema": {"type": "object"}, "cache_control": EPHEMERAL}
        bodies = {
            COUNT: {"messages": BLOCKS, "tools": [marked], "betas": ["b"]},
            "/tokenize": {"messages": [{**USER, "name": "Ann"}], "verbosity": "low"},
            CHAT: {"messages": [USER], "tools": [{**TOOL, "cache_control": EPHEMERAL}]},
        }
        notes = [
            (await served.http.post(path, json=body)).headers["x-paceline-ignored"] for path, body in bodies.items()
        ]
    assert notes == [
        "betas, messages.content.cache_control, tools.cache_control",
        "messages.name, verbosity",
        "tools.cache_control",
    ]


async def test_the_log_names_a_field_once_and_each_request_when_debugging(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(PLAIN, "Yes.") as served:
        with caplog.at_level(logging.DEBUG, "paceline_gateway.http.ignored_fields"):
            for _ in range(3):
                await served.http.post(CHAT, json=PLAINLY[CHAT] | {"store": True, "user": "secret"})
    notes = [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if record.name == "paceline_gateway.http.ignored_fields"
    ]
    assert sum(level == logging.INFO for level, _ in notes) == 2
    assert sum(level == logging.DEBUG and "store,user" in message for level, message in notes) == 3
    assert not any("secret" in message for _, message in notes)


NAMED = (
    "{% for m in messages %}<s>{{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}: {{ m.content }}</s>{% endfor %}"
)


async def test_a_template_that_writes_names_gets_them() -> None:
    async with serving(NAMED, "Yes.") as served:
        answer = await served.http.post(CHAT, json={"messages": [{**USER, "name": "Ann"}]})
        (request,) = served.canned.asked
        written = served.canned.text_of(request.token_ids)
    assert "<s>user (Ann): q" in written
    assert "x-paceline-ignored" not in answer.headers


SWITCHES = "{{ verbosity }} {{ reasoning_effort }} {{ enable_thinking | default('unset') }}|"


COUNTERS = {CHAT: "/tokenize", MESSAGES: COUNT}


@pytest.mark.parametrize(
    ("path", "fields", "written"),
    [
        (CHAT, {"verbosity": "low", "reasoning_effort": "high"}, "low high unset|"),
        (CHAT, {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, " high False|"),
        (MESSAGES, {"output_config": {"effort": "max"}, "thinking": {"type": "enabled"}}, " max True|"),
        (MESSAGES, {"thinking": {"type": "disabled"}}, "  False|"),
        (RESPONSES, {"text": {"verbosity": "high"}, "reasoning": {"effort": "low"}}, "high low unset|"),
    ],
)
async def test_a_template_that_has_a_switch_gets_it(path: str, fields: dict[str, Any], written: str) -> None:
    async with serving(SWITCHES + OPENED, "Yes.") as served:
        answer = await served.http.post(path, json=PLAINLY[path] | fields)
        (request,) = served.canned.asked
        assert served.canned.text_of(request.token_ids).startswith(written)
        if counter := COUNTERS.get(path):
            counted = (await served.http.post(counter, json={"messages": [USER], **fields})).json()
            assert counted.get("count", counted.get("input_tokens")) == len(request.token_ids)
    assert "x-paceline-ignored" not in answer.headers


async def test_no_effort_is_ignored_where_reasoning_can_t_be_switched_off_and_efforts_are_set_once() -> None:
    async with serving(OPENED, "Yes.") as served:
        answer = await served.http.post(CHAT, json={"messages": [USER], "reasoning_effort": "none"})
    assert answer.headers["x-paceline-ignored"] == "reasoning_effort"
    twice = {"messages": [USER], "reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}
    async with serving(SWITCHES + OPENED, "Yes.") as served:
        refused = (await served.http.post(CHAT, json=twice)).json()["error"]
    assert refused["param"] == "chat_template_kwargs.reasoning_effort"


async def test_no_effort_is_the_switch_of_a_template_that_knows_no_efforts() -> None:
    async with serving("{{ enable_thinking }}|" + OPENED, "Yes.") as served:
        answer = await served.http.post(CHAT, json={"messages": [USER], "reasoning_effort": "none"})
        (request,) = served.canned.asked
        assert served.canned.text_of(request.token_ids).startswith("False|")
    assert "x-paceline-ignored" not in answer.headers


async def test_a_client_without_a_model_gets_the_one_that_is_served() -> None:
    async with serving(PLAIN, "Yes.") as served:
        for path, body in PLAINLY.items():
            for named in ({}, {"model": None}, {"model": ""}, {"model": "dummy"}):
                assert (await served.http.post(path, json=body | named)).json()["model"] == "m"
            assert (await served.http.post(path, json=body | {"model": "other"})).status_code == 404


LIMITS = {CHAT: "max_completion_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}


async def test_a_limit_beyond_the_context_is_the_contexts_own() -> None:
    async with serving(PLAIN, "Yes.") as served:
        for path, field in LIMITS.items():
            for limit in (9_000, 64_000, 10**30):
                answer = await served.http.post(path, json=PLAINLY[path] | {field: limit})
                assert answer.status_code == 200, answer.text
    assert [request.max_new_tokens for request in served.canned.asked] == [9_000, None, None] * 3


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}, MARKED]}
BLOCK = "messages.0.content.0: content block of type"
PREFILL = "messages = '…, assistant': must be ended by a user's turn: prefill"
CUT_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}
LARGE = {"type": "json_schema", "json_schema": {"schema": {"a": "x" * 70_000}}}
BY_NAME: dict[str, Any] = {
    "web_search_options": {}, "audio": {"voice": "v"}, "n": 200, "unheard_of": 1, "max_completion_tokens": 0,
    "max_tokens": 0, "response_format": LARGE,
}  # fmt: skip
BY_NAME_OF_RESPONSES: dict[str, Any] = {
    "previous_response_id": "r", "conversation": "c", "unheard_of": 1, "background": True, "max_output_tokens": 0,
}  # fmt: skip
ITEMS: list[tuple[str, dict[str, Any]]] = [
    ("", {"type": "item_reference", "id": "i"}),
    ("", {"type": "custom_tool_call"}),
    (".content.0", said({"type": "input_file"})),
    (".content.0", said({"type": "input_image"})),
    (".content.0.text", said({"type": "input_text"})),
    (".arguments", CUT_CALL),
]
IMAGE = {"type": "image_url", "image_url": {"url": "u"}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {name: value}, name) for name, value in BY_NAME.items()),
    *((RESPONSES, {name: value}, name) for name, value in BY_NAME_OF_RESPONSES.items()),
    (CHAT, {"messages": [said(IMAGE)]}, "messages.0.content.0"),
    (CHAT, {"messages": [said(MARKED, {"type": "input_text", "text": "q"})]}, "messages.0.content.1"),
    (CHAT, {"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
    (RESPONSES, {"reasoning": {"effort": "much"}}, "reasoning.effort"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include.0"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]}, "input.0.call_id"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    *((RESPONSES, {"input": [USER, item]}, f"input.1{place}") for place, item in ITEMS),
]


async def test_what_would_change_a_text_is_refused_by_its_own_path() -> None:
    async with serving(HERMES, "Yes.") as served:
        for (path, fields, param), stream in product(REFUSED, (False, True)):
            answer = await served.http.post(path, json=PLAINLY[path] | fields | {"stream": stream})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
            assert answer.json()["error"]["message"].startswith(param)
        assert served.canned.asked == []
        assert (await served.http.post(CHAT, json=PLAINLY[CHAT])).status_code == 200


TO_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": [said({"type": "image", "source": {}})]}, f"{BLOCK} image"),
    ({"messages": [said({"type": "document", "source": {}})]}, f"{BLOCK} document"),
    ({"messages": [USER, {"role": "assistant", "content": "So"}]}, PREFILL),
    ({"messages": [USED, USER]}, "messages.0.content"),
    ({"thinking": {"type": "forced"}}, "thinking"),
    ({"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"output_config": {"effort": "much"}}, "output_config"),
    ({"temperature": 1000}, "temperature"),
    ({"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0: tool of type web_search_20250305"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name = 'a b'"),
    ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools.0.input_schema.type = 'string'"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": [said({"type": "tool_result", "tool_use_id": "t"})]}, "messages.0.content.0.tool_use_id = 't'"),
]


async def test_anthropics_errors_have_its_own_paths() -> None:
    async with serving(HERMES, "Yes.") as served:
        for (fields, message), stream in product(TO_MESSAGES, (False, True)):
            answer = await served.http.post(MESSAGES, json=PLAINLY[MESSAGES] | {"stream": stream} | fields)
            body = answer.json()
            assert (answer.status_code, body["type"], set(body["error"])) == (400, "error", {"type", "message"})
            assert body["error"]["message"].startswith(message)


OPAQUE = {"type": "redacted_thinking", "data": "x"}
REFUSAL = {"type": "refusal", "refusal": "No."}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
REASONS = "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}/{{ m.content }}\n{% endfor %}"


def answer(content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("path", "template", "earlier", "written"),
    [
        (CHAT, PLAIN, answer([REFUSAL]), "<s>assistant\nNo.</s>"),
        (CHAT, PLAIN, answer(refusal="No."), "<s>assistant\nNo.</s>"),
        (RESPONSES, PLAIN, answer([REFUSAL]), "<s>assistant\nNo.</s>"),
        (MESSAGES, PLAIN, answer([OPAQUE, {"type": "text", "text": "No."}]), "<s>assistant\nNo.</s>"),
        (RESPONSES, REASONS, THOUGHT, "\nassistant: hm/\n"),
        (CHAT, REASONS, answer(reasoning_content="hm"), "\nassistant: hm/\n"),
        (CHAT, REASONS, {"role": "assistant", "reasoning": "hm"}, "\nassistant: hm/\n"),
        (MESSAGES, REASONS, answer([{"type": "thinking", "thinking": "hm"}]), "\nassistant: hm/\n"),
    ],
)
async def test_refusals_and_reasoning_of_earlier_answers_are_taken_as_each_api_has_them(
    path: str, template: str, earlier: dict[str, Any], written: str
) -> None:
    turns = {"input" if path == RESPONSES else "messages": [USER, earlier, USER]}
    async with serving(template, "Yes.") as served:
        response = await served.http.post(path, json=PLAINLY[path] | turns)
        assert response.status_code == 200, response.text
        (request,) = served.canned.asked
        assert written in served.canned.text_of(request.token_ids)


ENDS = "a\u2028b\u2029c\u0085d"


async def test_events_have_no_line_ends_that_clients_split_at() -> None:
    async with serving(PLAIN, ENDS) as served:
        for path, body in PLAINLY.items():
            text = (await served.http.post(path, json=body | {"stream": True})).text
            assert [line for line in text.splitlines() if line and line[:6] not in ("data: ", "event:")] == []
            assert all(escaped in text for escaped in (r"\u2028", r"\u2029", r"\u0085"))
