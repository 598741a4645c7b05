"""A draft service that answers wrongly, or never: the text is the target's own, the round costs at most its wait."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from paceline.client import Generation
from paceline.protocol.generation import GenerateRequest, Provenance, SpeculationSettings
from paceline.protocol.handshake import MAX_FRAME_BYTES
from paceline.protocol.proposal import AUTO, ROOT, Acceptance
from tests.e2e.cluster import full
from tests.e2e.in_process import TARGET
from tests.e2e.lying_relay import HostileCluster, Lie, hostile_cluster, in_events
from tests.services.harness import eventually

LENGTH = 24
WAIT_MS = 50.0
TIMED = f"{TARGET},step_ms=20"
"""A target that leaves the draft time to prepare for outcomes."""
CROWDED = f"{TIMED},max_kv_rows=40"
"""A target with rows for fewer nodes than are proposed to it."""
PROMPT = (1, 2, 3)
REPEATS = (5, 6, 7, 8, 5, 6)
"""Its first round waits for the draft, and carries an n-gram match without one."""
MOST_WAITS = 5
"""Rounds 1, 3, 6, 11 and 20."""


def of_proposals(change: Callable[[Any], None]) -> Lie:
    """Changes what is drafted."""
    return in_events("proposal", lambda drafted: change(drafted.proposal))


def of_outcomes(change: Callable[[Any], None]) -> Lie:
    """Changes what was drafted for an outcome."""
    return in_events("proposal", lambda drafted: change(drafted) if drafted.HasField("outcome") else None)


def with_nodes(proposal: Any, tokens: list[int], parents: list[int] | None = None) -> None:
    proposal.token_ids[:], proposal.draft_probabilities[:] = tokens, [0.5] * len(tokens)
    proposal.parents[:] = parents or []


def wide(proposal: Any) -> None:
    with_nodes(proposal, [*range(60)], [ROOT] * 60)


def with_supports(proposal: Any) -> None:
    for _ in proposal.token_ids:
        proposal.supports.add(token_ids=[1, 2], probabilities=[0.5, 0.5])


def only(frame: Any, is_kept: Callable[[Any], bool]) -> None:
    """Nothing else is heard of the draft."""
    for event in [each for each in getattr(frame, "events", ()) if not is_kept(each)]:
        frame.events.remove(event)


def only_firsts(frame: Any) -> None:
    only(frame, lambda event: event.HasField("proposal") and not event.proposal.HasField("outcome"))


def too_long(frame: Any) -> None:
    """What is drafted ahead may be longer than the round's budget."""
    only_firsts(frame)
    of_proposals(lambda proposal: with_nodes(proposal, [1] * 20))(frame)


def as_large_as_a_frame(frame: Any) -> None:
    """The round that carries it would be larger."""
    only_firsts(frame)
    for event in getattr(frame, "events", ()):
        event.proposal.proposal.drafter = "x" * (MAX_FRAME_BYTES // len(frame.events) - 200)


def for_another_outcome(frame: Any) -> None:
    only(frame, lambda event: event.HasField("proposal"))
    in_events("proposal", lambda drafted: setattr(drafted.outcome, "base_length", 10_000))(frame)


def never(frame: Any) -> None:
    only(frame, lambda event: False)


def wide_ahead(frame: Any) -> None:
    only(frame, lambda event: event.HasField("proposal") and event.proposal.HasField("outcome"))
    of_proposals(wide)(frame)


LIES: dict[str, Lie] = {
    "out of range": of_proposals(lambda proposal: with_nodes(proposal, [64])),
    "too long": too_long,
    "without supports": of_proposals(lambda proposal: proposal.ClearField("supports")),
    "with supports": of_proposals(with_supports),
    # The records of all rounds would be more than a message holds.
    "under a long name": of_proposals(lambda proposal: setattr(proposal, "drafter", "x" * 200_000)),
    "as large as a frame": as_large_as_a_frame,
    "for another outcome": for_another_outcome,
    "never": never,
}


async def both(cluster: HostileCluster, lie: Lie, **changes: Any) -> tuple[Generation, Generation]:
    """A text without the wrong draft, and one with it."""
    cluster.draft.lie = lie
    plain, drafted = [await cluster.client.generate(request(off=off, **changes)) for off in (True, False)]
    return plain, drafted


def request(
    acceptance: Acceptance = Acceptance.COUPLED, *, off: bool, prompt: tuple[int, ...] = PROMPT
) -> GenerateRequest:
    """Matches are proposed only for a prompt that repeats itself."""
    drafter = AUTO if prompt is REPEATS else "model"
    speculation = SpeculationSettings(drafter=drafter, off=off, num_draft_tokens=3)
    return GenerateRequest(
        token_ids=prompt, seed=8, max_new_tokens=LENGTH, acceptance=acceptance, speculation=speculation
    )


wrong_draft = partial(hostile_cluster, draft_timeout_ms=WAIT_MS)


@pytest.mark.parametrize("name", LIES)
async def test_the_text_goes_on_without_it(name: str) -> None:
    acceptance = Acceptance.REJECTION if name == "without supports" else Acceptance.COUPLED
    async with wrong_draft() as cluster:
        plain, drafted = await both(cluster, LIES[name], acceptance=acceptance)
    assert set(drafted.provenance) == {Provenance.TARGET}
    assert drafted.token_ids == plain.token_ids
    waits = [record for record in drafted.stats.records if record.draft_wait_ms >= WAIT_MS]
    assert len(waits) <= MOST_WAITS, "behind a wait in vain nothing is waited for until the draft is heard of"


@pytest.mark.parametrize(
    ("field", "value", "prompt", "reason"),
    [
        ("next_token", 64, PROMPT, "drafted for a next token of 64"),
        full("node", 40, PROMPT, "drafted for node 40"),
        ("node", 40, REPEATS, "drafted for node 40"),
    ],
)
async def test_a_wrong_outcome_ends_the_drafts_session_and_nothing_else(
    field: str, value: int, prompt: tuple[int, ...], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with wrong_draft(target_model=TIMED) as cluster:
        lie = of_outcomes(lambda drafted: setattr(drafted.outcome, field, value))
        plain, drafted = await both(cluster, lie, prompt=prompt)
    assert drafted.token_ids == plain.token_ids
    assert reason in caplog.text


@pytest.mark.parametrize("lie", [of_proposals(wide), wide_ahead], ids=["for the round", "ahead"])
async def test_what_the_target_has_no_rows_for_is_cut(lie: Lie, caplog: pytest.LogCaptureFixture) -> None:
    async with wrong_draft(target_model=CROWDED) as cluster:
        plain, drafted = await both(cluster, lie)
        await eventually(lambda: cluster.target._servicer.status().kv_rows == 0, "the target holds nothing")
    assert drafted.token_ids == plain.token_ids
    assert any(record.proposed for record in drafted.stats.records), "the rest is verified"
    assert "target refused" not in caplog.text
