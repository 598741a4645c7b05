"""Features through all three services: the target's go to the drafter of the request, and no text changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.client import AsyncClient, Generation
from paceline.drafting import feature_feed
from paceline.engine.table.engine import load_table
from paceline.protocol.features import Features
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.e2e.in_process import NEAR, TARGET, coordinator, three_services
from tests.services.feature_spy import FeatureSpy, misplaced, positions
from tests.services.harness import draft_service, eventually, target_service

PROMPT = tuple(range(1, 41))
LENGTH = 50
LAST_TOKENS = 20
"""Tokens whose rows may still be on their way when the text ends: some rounds of it, on a machine with other work."""
CHAIN = SpeculationSettings(drafter="model", num_draft_tokens=4)
TREE = SpeculationSettings(drafter="model", tree_widths=(3, 2, 1), num_draft_tokens=3)
SHORT = SpeculationSettings(drafter="model", num_draft_tokens=1)
OFF = SpeculationSettings(off=True)


@asynccontextmanager
async def cluster(**settings: Any) -> AsyncIterator[tuple[AsyncClient, FeatureSpy]]:
    spy = FeatureSpy(load_table(NEAR))
    async with three_services(load_table(TARGET), spy, **settings) as client:
        yield client, spy


request = partial(
    GenerateRequest,
    token_ids=PROMPT,
    seed=5,
    max_new_tokens=LENGTH,
    ignore_eos=True,
    sampling=SamplingParams(temperature=0.8),
)
drafted = partial(request, speculation=CHAIN)
ALONE = request(speculation=OFF)


def check(spy: FeatureSpy, session: int, one: Generation) -> None:
    """The session was given rows of the text from its first token on, each once; nothing waits for the last ones."""
    text = (*PROMPT, *one.token_ids)
    taken = spy.taken[session]
    assert misplaced(taken, text) == []
    came = positions(taken)
    assert came == [*range(len(came))]
    assert len(came) >= len(text) - LAST_TOKENS, "as the text grows"


@pytest.mark.parametrize(
    ("acceptance", "speculation", "settings"),
    [
        (Acceptance.COUPLED, TREE, {}),
        (Acceptance.COUPLED, SHORT, {"max_prefetched": 0, "fan_out": 0}),
        (Acceptance.BLOCK, CHAIN, {"fan_out": 0}),
    ],
)
async def test_the_drafter_is_given_the_rows_of_the_text(
    acceptance: Acceptance, speculation: SpeculationSettings, settings: dict[str, Any]
) -> None:
    async with cluster(**settings) as (client, spy):
        one = await client.generate(request(speculation=speculation, acceptance=acceptance))
        check(spy, max(spy.taken), one)
        assert sum(record.accepted for record in one.stats.records) > 5
        generated = sum(record.feature_bytes for record in one.stats.records)
        assert 0 < generated < one.stats.feature_bytes
        assert one.stats.feature_bytes % 48 == 0, "three layers of eight float16"
        if acceptance is Acceptance.COUPLED:
            alone = await client.generate(ALONE)
            assert (alone.token_ids, alone.stats.feature_bytes) == (one.token_ids, 0)


async def test_a_draft_that_is_killed_with_rows_in_flight_is_followed_by_another_that_is_given_all() -> None:
    spies = [FeatureSpy(load_table(NEAR)) for _ in range(2)]
    async with AsyncExitStack() as services:
        _, target = await services.enter_async_context(target_service(load_table(f"{TARGET},step_ms=2")))
        stacks = [await services.enter_async_context(AsyncExitStack()) for _ in spies]
        drafts = [
            (await stack.enter_async_context(draft_service(spy._engine, drafter=spy)))[1]
            for stack, spy in zip(stacks, spies, strict=True)
        ]
        client = await services.enter_async_context(coordinator(target, *drafts))
        running = asyncio.ensure_future(client.generate(drafted()))

        def has_many(spy: FeatureSpy) -> bool:
            return any(len(positions(taken)) > len(PROMPT) + 4 for taken in spy.taken.values())

        await eventually(lambda: any(map(has_many, spies)), "rows have come")
        killed = int(has_many(spies[1]))
        await stacks[killed].aclose()
        one = await running
        other = spies[1 - killed]
        check(other, max(other.taken), one)
        assert one.token_ids == (await client.generate(ALONE)).token_ids
        after = await client.generate(drafted(seed=6))
        check(other, max(other.taken), after)


async def test_mutant_rows_one_further_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = feature_feed.FeatureFeed.slice

    def shifted(feed: feature_feed.FeatureFeed, start: int, end: int) -> list[Features]:
        return [replace(each, first_position=each.first_position + 1) for each in original(feed, start, end - 1)]

    monkeypatch.setattr(feature_feed.FeatureFeed, "slice", shifted)
    async with cluster() as (client, spy):
        one = await client.generate(drafted())
        with pytest.raises(AssertionError):
            check(spy, max(spy.taken), one)
