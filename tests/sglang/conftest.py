"""SGLang restated in its own place, for every test of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from paceline.drafting import server_client
from tests.drafting.foreign_server import Judge
from tests.sglang import restated


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    restated.install(monkeypatch)
    monkeypatch.setattr("paceline.models.vocabulary.vocabulary_fingerprint", lambda vocabulary: "")
    monkeypatch.setattr(server_client, "GoodputJudge", Judge)
    monkeypatch.setenv("PACELINE_SGLANG", json.dumps({"draft": {"address": "127.0.0.1:1"}}))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets where the plugin's drafts come from, and the shape of its trees."""

    def set_drafts(address: str, *, nodes: int = 5, topk: int = 1, steps: int = 4, **settings: Any) -> None:
        monkeypatch.setenv("PACELINE_SGLANG", json.dumps({"draft": {"address": address}, **settings}))
        monkeypatch.setattr(restated.SPEC, "speculative_num_draft_tokens", nodes)
        monkeypatch.setattr(restated.SPEC, "speculative_eagle_topk", topk)
        monkeypatch.setattr(restated.SPEC, "speculative_num_steps", steps)

    return set_drafts
