"""Clients with their defaults are answered."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.canned import serving
from tests.gateway.recorded_clients import RECORDED
from tests.gateway.templates import HERMES, THINKING


@pytest.mark.parametrize("template", [HERMES, THINKING], ids=["plain", "reasoning"])
async def test_clients_with_their_defaults_are_answered(template: str) -> None:
    async with serving(template, "Yes.") as served:
        for client, (path, body) in RECORDED.items():
            answer = await served.http.post(path, json=body)
            assert answer.status_code == 200, (client, answer.text)
            request = served.canned.asked.pop()
            assert not served.canned.asked
            prompt = served.canned.text_of(request.token_ids)
            assert "Yes" in answer.text or '"Y"' in answer.text, client
            assert request.max_new_tokens is None or request.max_new_tokens < 10_000, client
            assert all(text in prompt for text in _texts(body)), (client, prompt)


def _texts(body: dict[str, Any]) -> list[str]:
    """Of messages and the system prompt: none of them gets lost."""
    messages = [*body.get("messages", ()), *body.get("input", ()), {"content": body.get("system")}]
    contents = [message.get("content") or "" for message in messages]
    return [
        part if isinstance(part, str) else part["text"]
        for content in contents
        for part in ([content] if isinstance(content, str) else content)
    ]
