"""A service of each kind with a recording engine, and a link to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.services.feature_spy import FeatureSpy
from tests.services.harness import Events, RecordingEngine, linked_draft, linked_target


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
async def target(engine: RecordingEngine) -> AsyncIterator[Events]:
    async with linked_target(engine) as events:
        yield events


@pytest.fixture
async def draft(engine: RecordingEngine) -> AsyncIterator[Events]:
    async with linked_draft(engine) as events:
        yield events


@pytest.fixture
def spy(engine: RecordingEngine) -> FeatureSpy:
    return FeatureSpy(engine)


@pytest.fixture
async def spied(engine: RecordingEngine, spy: FeatureSpy) -> AsyncIterator[Events]:
    """A link to a draft service whose drafter is the spy."""
    async with linked_draft(engine, drafter=spy) as events:
        yield events
