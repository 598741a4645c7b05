"""Hidden states of a target whose engine has steps of few shapes, over real gRPC: what transformers computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from paceline.engine.cuda import static_engine
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.decoder import build_engine
from paceline.engine.features import FeatureRows
from paceline.engine.hidden_states import capture_states
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.features import EMBEDDING, FINAL, FeatureNeed, FeatureOffer, FeatureRequest
from paceline.runtime.config import EngineSettings
from tests.engine import tiny
from tests.engine.test_hidden_states import own_states
from tests.services.expected import own_tokens
from tests.services.feature_spy import positions
from tests.services.harness import Events, chain, linked_target
from tests.services.test_target_features import PREFIX, Caller, Propose, fork, target_only

NEEDS = (FeatureNeed((2, EMBEDDING, FINAL)), FeatureNeed((0,)))
TEXT = 40
ROUNDING = 2e-3
"""Of float16, on the wire."""


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return tiny.random_model(tiny.llama())


@pytest.fixture(scope="module")
def text(reference: PreTrainedModel) -> list[int]:
    """The target's own, by plain forward passes."""
    return [*PREFIX, *own_tokens(PREFIX, TEXT - len(PREFIX), logits=tiny.Plain(reference).logits)]


def half_right(text: Sequence[int]) -> Propose:
    """Chains whose first two tokens are the target's own."""
    return lambda known: chain((*text[len(known) : len(known) + 2], 96, 95))


def branching(text: Sequence[int]) -> Propose:
    """Trees whose right path is not their first nodes."""
    return lambda known: fork(text[len(known) :])


@asynccontextmanager
async def serving_static() -> AsyncIterator[tuple[StaticEngine, Events]]:
    settings = EngineSettings(threads=1, kv_bytes=1 << 22)
    engine = build_engine(
        tiny.random_model(tiny.llama()), TableTokenizer(tiny.VOCAB, None), settings, "tiny", static=True
    )
    assert isinstance(engine, StaticEngine)
    async with linked_target(engine) as events:
        assert events.link.welcome is not None
        assert events.link.welcome.features == FeatureOffer(3, 32)
        yield engine, events


def misplaced(caller: Caller, need: FeatureNeed, model: PreTrainedModel) -> list[int]:
    """Positions whose features are not those of the text up to there."""
    assert positions(caller.taken) == [*range(len(caller.text) - 1)]
    rows = np.concatenate([rows for _, rows in caller.taken])
    right = [own_states(model, caller.text[: end + 1], need) for end in range(len(rows))]
    near = np.asarray(np.isclose(rows, np.stack(right), rtol=ROUNDING, atol=ROUNDING))
    return [position for position, row in enumerate(near) if not row.all()]


async def test_features_follow_the_rounds_of_sessions_that_read_different_layers(
    reference: PreTrainedModel, text: list[int]
) -> None:
    async with serving_static() as (_, events):
        callers = [Caller(events, session=session) for session in (1, 2, 3, 4)]
        proposals = (half_right(text), branching(text), target_only, half_right(text))
        needs = (NEEDS[0], NEEDS[1], NEEDS[0], NEEDS[1])
        unwatched = Caller(events, session=5)
        unwatched.open(features=None)
        await asyncio.gather(
            *(
                caller.write(propose, features=FeatureRequest(need))
                for caller, propose, need in zip(callers, proposals, needs, strict=True)
            ),
            unwatched.run(half_right(text)),
        )
        for caller, need in zip(callers, needs, strict=True):
            assert misplaced(caller, need, reference) == []
            assert caller.text == text[: len(caller.text)], "features change no text"
        assert [{*caller.accepted} for caller in (*callers, unwatched)] == [{2}, {2}, {0}, {2}, {2}]


async def test_rows_of_a_cached_prefix_are_computed_for_who_reads_them(
    reference: PreTrainedModel, text: list[int]
) -> None:
    async with serving_static() as (_, events):
        for session in (1, 2):
            caller = Caller(events, session=session)
            await caller.write(target_only, features=FeatureRequest(NEEDS[0]))
            assert misplaced(caller, NEEDS[0], reference) == []


def a_layer_further(model: Any, layers: Sequence[int], out: dict[int, Any]) -> Any:
    return capture_states(model, layers, dict(zip(layers, [*out.values()][1:] + [*out.values()][:1], strict=True)))


def a_row_further(engine: StaticEngine, session: int) -> FeatureRows:
    return np.roll(_features(engine, session), 1, axis=0)


_features = StaticEngine.features


@pytest.mark.parametrize(
    ("where", "name", "mutant"),
    [(static_engine, "capture_states", a_layer_further), (StaticEngine, "features", a_row_further)],
)
async def test_that_comparison_notices(
    where: Any,
    name: str,
    mutant: Any,
    reference: PreTrainedModel,
    text: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving_static() as (_, events):
        monkeypatch.setattr(where, name, mutant)
        caller = Caller(events)
        await caller.write(half_right(text), features=FeatureRequest(NEEDS[0]))
        assert misplaced(caller, NEEDS[0], reference) != []
