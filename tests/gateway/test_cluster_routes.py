"""`/cluster`: what coordinators say, and those that say nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from paceline.protocol.errors import PacelineError, PeerUnavailable, Unauthenticated, VocabularyMismatch
from paceline.protocol.explanation import GroupReport, ModeReport
from paceline.protocol.generation import ModelDescription, PeerDescription, PeerKind
from paceline.protocol.handshake import Fingerprint
from paceline_gateway.http.operating_routes import cluster_view
from paceline_gateway.upstream.caller import HttpCaller
from paceline_gateway.upstream.services import Services

GROUP = GroupReport("drafts", 40.0, 3, 1.25, 1.0625, (ModeReport("drafts", "runs", 1.5),))
TARGET = PeerDescription(PeerKind.TARGET, "t:1", True, Fingerprint("big"), "", 3, 5, 9, 2, 11.5, GROUP)
DRAFT = PeerDescription(PeerKind.DRAFT, "d:1", False, Fingerprint(), "no link to draft at d:1")
MODEL = ModelDescription("m", Fingerprint("big"), Fingerprint(), 64, ("auto",), True, False, (TARGET, DRAFT))


def coordinator(address: str, *answers: ModelDescription | PacelineError) -> Any:
    """One with four requests, that answers with a description, or fails."""
    return SimpleNamespace(address=address, request_count=4, describe=AsyncMock(side_effect=answers))


async def view(*coordinators: Any) -> list[dict[str, Any]]:
    services = SimpleNamespace(
        coordinators=SimpleNamespace(members=coordinators), served_name=lambda description: f"my-{description.name}"
    )
    shown = await cluster_view(cast(Services, services), HttpCaller("1", "key"))
    views: list[dict[str, Any]] = shown["coordinators"]
    return views


async def test_a_coordinators_peers_are_shown_as_it_describes_them() -> None:
    described = coordinator("c:1", MODEL)
    (shown,) = await view(described)
    described.describe.assert_awaited_once_with(HttpCaller("1", "key"))
    group = {
        "mode": "drafts", "mode_steps": 40.0, "sessions": 3, "promise": 1.25, "promise_bound": 1.0625,
        "modes": ({"name": "drafts", "state": "runs", "gain": 1.5, "wait_steps": 0.0},),
    }  # fmt: skip
    target = {
        "role": "target", "address": "t:1", "up": True, "problem": "", "model": "big", "sessions": 3,
        "step_sessions": 5, "step_rows": 9, "queue": 2, "step_ms": 11.5, "group": group,
    }  # fmt: skip
    draft = {
        "role": "draft", "address": "d:1", "up": False, "problem": "no link to draft at d:1", "model": "",
        "sessions": 0, "step_sessions": 0, "step_rows": 0, "queue": 0, "step_ms": 0.0, "group": None,
    }  # fmt: skip
    model = {"name": "my-m", "max_length": 64, "drafters": ["auto"], "peers": [target, draft]}
    assert shown == {"address": "c:1", "requests": 4, "reachable": True, "problem": "", "models": [model]}


@pytest.mark.parametrize("failure", [PeerUnavailable("gone"), VocabularyMismatch("another tokenizer")])
async def test_one_that_fails_is_shown_beside_the_others(failure: PacelineError) -> None:
    lost, there = await view(coordinator("c:1", failure), coordinator("c:2", MODEL))
    problem = {"reachable": False, "problem": failure.message, "models": []}
    assert lost == {"address": "c:1", "requests": 4, **problem}
    assert there["reachable"]


async def test_without_a_key_nothing_is_shown() -> None:
    with pytest.raises(Unauthenticated):
        await view(coordinator("c:1", MODEL), coordinator("c:2", Unauthenticated("no key")))
