"""Clients with their defaults are answered."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.canned import serving
from tests.gateway.recorded_clients import RECORDED
from tests.gateway.templates import HERMES, THINKING


@pytest.mark.parametrize("template", [HERMES, THINKING], ids=["plain", "reasoning"])
@pytest.mark.parametrize("client", RECORDED)
async def test_a_client_with_its_defaults_is_answered(client: str, template: str) -> None:
    path, body = RECORDED[client]
    async with serving(template, "Yes.") as served:
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        (request,) = served.canned.asked
        prompt = served.canned.text_of(request.token_ids)
    assert "Yes" in answer.text or '"Y"' in answer.text
    assert request.max_new_tokens is None or request.max_new_tokens < 10_000
    assert all(text in prompt for text in _texts(body)), prompt


def _texts(body: dict[str, Any]) -> list[str]:
    """Of messages and the system prompt: none of them gets lost."""
    messages = [*body.get("messages", ()), *body.get("input", ()), {"content": body.get("system")}]
    contents = [message.get("content") or "" for message in messages]
    return [
        part if isinstance(part, str) else part["text"]
        for content in contents
        for part in ([content] if isinstance(content, str) else content)
    ]
