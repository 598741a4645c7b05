"""Hidden states that the static engine keeps, on a CPU: those of the ragged engine, of every row of every shape."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine import decoder, hidden_states
from paceline.engine.cuda import static_engine
from paceline.engine.cuda.buckets import StepShape
from paceline.engine.cuda.footprint import static_bytes
from paceline.engine.cuda.graphs import host_buffer
from paceline.engine.cuda.static_engine import StaticEngine
from paceline.engine.features import FeatureSource
from paceline.engine.hidden_states import KeptStates, States, capture_states
from paceline.engine.interface import Ranking, StepItem, StepPlan
from paceline.engine.transformer import TransformerEngine
from paceline.protocol.features import EMBEDDING, FINAL, FeatureNeed, FeatureOffer
from paceline.protocol.sampling import NoiseKey
from paceline.runtime.config import EngineSettings
from tests.conftest import ON_CPU
from tests.engine import tiny
from tests.engine.families import CONTEXT, named
from tests.engine.test_device_engine import Replaying
from tests.engine.test_growth import Grower
from tests.engine.test_transformer import Writer

NEEDS = {
    0: FeatureNeed((1, FINAL, EMBEDDING, 0)), 1: FeatureNeed((FINAL,)), 2: FeatureNeed((0, EMBEDDING)),
    4: FeatureNeed((EMBEDDING, 1)), 6: FeatureNeed((FINAL, 1)),
}  # fmt: skip
"""By session; 3 and 5 want none. 0 to 3 write chains and trees, those of 4 and 5 grow, 6 has a prompt."""
OTHERS = {0: FeatureNeed((2,)), 1: FeatureNeed((FINAL, 0)), 6: FeatureNeed((EMBEDDING,))}
SESSIONS = range(7)
MANY = 100
"""Rows of a chunk of which there is no graph."""
SETTINGS = EngineSettings(threads=1, kv_bytes=1 << 23)
_NO_GRAPH = pytest.mark.skipif(not ON_CPU, reason="in float32 its experts copy from the host: no graph")
SEEN = (
    *("llama", "gpt_neox", "Gemma 3n", "Llama 4"),
    *tiny.in_full("qwen2", "qwen3, padded vocabulary", "Mistral 7B v0.1", "Gemma 2"),
    pytest.param("gpt-oss", marks=[_NO_GRAPH, pytest.mark.full]),
)
"""Several streams; a base of another name; in full windows, soft-caps and sinks."""
Differ = pytest.raises(AssertionError, match="Not equal to tolerance")


def model_of(family: str) -> Any:
    return tiny.random_model(tiny.FAMILIES[family]() if family in tiny.FAMILIES else named(family).config())


def static(family: str = "llama") -> StaticEngine:
    return tiny.static(model_of(family), SETTINGS)


def eager(family: str = "llama") -> TransformerEngine:
    engine = tiny.transformer(model_of(family), SETTINGS)
    engine.row_decoder = None  # the layers themselves
    return engine


def plans(seed: int, context: int = tiny.CONTEXT) -> Iterator[StepPlan]:
    """A prompt in chunks, then its tokens one by one, beside chains, trees, roll-backs and trees that grow."""
    source = random.Random(seed)
    writers = [Writer(session, random.Random(source.random())) for session in range(4)]
    growers = [Grower(session, random.Random(source.random())) for session in (4, 5)]
    text = tuple(source.choices(range(tiny.VOCAB), k=context))
    row = 0
    for step, new in enumerate((MANY, 40, 1, 9, 1, 30, 1, 1) if context > CONTEXT else (17, 5, 1, 9, 1)):
        prompt = StepItem(6, row, text[row : row + new], logit_rows=(new - 1,))
        row += new
        stepping = source.sample(writers, k=source.randint(1, 3))
        items = [writer.next_item() for writer in stepping] + [grower.step()[0] for grower in growers]
        yield StepPlan((*items, prompt) if step % 2 else (prompt, *items))
        yield StepPlan((StepItem(6, row, text[row : row + 1], logit_rows=(0,)),))
        row += 1


@dataclass
class Beside:
    """Two engines that run the same plans; the static one races the rows of two steps of three."""

    static: StaticEngine
    eager: TransformerEngine

    def run(self, seed: int = 0, context: int = tiny.CONTEXT, needs: dict[int, FeatureNeed] = NEEDS) -> int:
        """Compare every row; returns how many."""
        compared = 0
        for engine in (self.static, self.eager):
            opened(engine, context, needs)
        for number, plan in enumerate(plans(seed, context)):
            self.eager.step(plan)
            self.static.step_and_rank(plan, rankings(plan) if number % 3 else [None] * len(plan.items))
            for item in plan.items:
                if item.session in needs:
                    right, found = (each.features(item.session) for each in (self.eager, self.static))
                    assert len(found) == len(item.token_ids)
                    np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3)
                    compared += len(found)
        return compared


def opened(engine: StaticEngine | TransformerEngine, context: int, needs: dict[int, FeatureNeed]) -> None:
    for session in SESSIONS:
        engine.close(session)
        engine.open(session, context + 20)
        if session in needs:
            engine.keep_features(session, needs[session])


def rankings(plan: StepPlan) -> list[Ranking | None]:
    every = [Ranking(NoiseKey(3), 0.8, tuple(range(len(item.logit_rows)))) for item in plan.items]
    return [None if item.session == 1 else each for item, each in zip(plan.items, every, strict=True)]


@pytest.mark.parametrize("family", SEEN)
def test_rows_are_those_of_the_ragged_engine(family: str) -> None:
    both, is_long = Beside(static(family), eager(family)), family in tiny.FAMILIES
    assert isinstance(both.static, FeatureSource)
    assert both.static.info.features == both.eager.info.features is not None
    assert both.run(context=tiny.CONTEXT if is_long else CONTEXT) > (250 if is_long else 80)


def test_a_model_whose_layers_are_not_found_offers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "_decoder", lambda model: None)
    engine = static()
    assert engine.info.features is None
    assert engine._static.states.numel() == 0
    tiny.read(engine, (1, 2, 3))


def test_logits_are_the_same_bits() -> None:
    engine, logits = static(), []
    for needs in (NEEDS, {}):
        opened(engine, tiny.CONTEXT, needs)
        logits.append([rows.copy() for plan in plans(0) for rows in engine.step(plan)])
    for one, same in zip(*logits, strict=True):
        np.testing.assert_array_equal(one, same)
    with pytest.raises(KeyError):
        engine.features(0)


class Noting(Replaying):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[StepShape] = []

    def run(self, shape: Any, body: Callable[[], None]) -> None:
        self.shapes.append(shape)
        super().run(shape, body)


class OneForAll(Noting):
    """A graph for a shape, whatever is watched."""

    def run(self, shape: Any, body: Callable[[], None]) -> None:
        super().run(replace(shape, feature_layers=()), body)


def replayed(monkeypatch: pytest.MonkeyPatch, runner: Noting) -> Beside:
    monkeypatch.setattr(decoder, "runner_for", lambda device, *, graphs: runner)
    return Beside(static(), eager())


def test_graphs_write_what_is_watched_into_buffers_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Noting()
    both = replayed(monkeypatch, runner)
    for needs in (NEEDS, {}, OTHERS, NEEDS):
        before = runner.replays
        both.run(needs=needs)
    assert runner.replays - before > 10, "all but the longest chunks"
    layers = {shape.feature_layers for shape in runner.shapes}
    assert layers >= {(), (FINAL, 1), (EMBEDDING,), (FINAL, EMBEDDING, 0, 1)}
    mutant = replayed(monkeypatch, OneForAll())
    mutant.run(needs=OTHERS)
    with pytest.raises(AssertionError):
        mutant.run(needs=NEEDS)


def test_what_nobody_watches_costs_no_copy_and_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Noting()
    both = replayed(monkeypatch, runner)
    both.run(needs={})
    graphs = runner.graphs
    assert {shape.states for shape in runner.shapes} == {0}
    copied: list[int] = []

    def noting(model: Any, layers: Sequence[int], out: States) -> AbstractContextManager[States]:
        copied.extend(layers)
        return capture_states(model, layers, out)

    monkeypatch.setattr(static_engine, "capture_states", noting)
    both.run(needs={3: FeatureNeed((0,))})
    assert {*copied} == {0}
    assert {shape.feature_layers for shape in runner.shapes} == {(), (0,)}
    steps = [shape for shape in runner.shapes if shape.feature_layers]
    assert runner.graphs - graphs == len({*steps}), "one for each shape in which session 3 takes part"


@pytest.mark.parametrize("room", [0, 40])
def test_what_has_no_room_in_the_static_buffers_goes_to_the_host(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, ...]] = []

    def noting(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        taken.append(tuple(size))
        return host_buffer(size, dtype, device)

    monkeypatch.setattr(static_engine, "STATIC_STATES", room)
    monkeypatch.setattr(static_engine, "host_buffer", noting)
    Beside(static(), eager()).run()
    states = [count for count, hidden in taken if count and hidden == 32]
    assert len(states) > 5
    assert all(count > room for count in states if count != 128 * 2), "a chunk goes there, whatever the room"


def test_a_start_with_graphs_keeps_some_in_all_three_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Noting()
    monkeypatch.setattr(static_engine, "GraphRunner", Noting)
    replayed(monkeypatch, runner)
    watching = [shape for shape in runner.shapes if shape.feature_layers]
    assert {shape.feature_layers for shape in watching} == {(FINAL, EMBEDDING)}
    assert {watching.count(shape) for shape in watching} == {3}


def test_the_budget_has_the_static_buffer() -> None:
    made, settings = static(), SETTINGS.model_copy(update={"cuda_graphs": False})  # those take as much again
    without, with_states = (
        static_bytes(settings, made.attention, tiny.CONTEXT, tiny.VOCAB, each) for each in (None, FeatureOffer(3, 32))
    )
    assert with_states - without == made._static.states.nbytes == 4096 * 32 * 4


def a_layer_further(model: Any, layers: Sequence[int], out: States) -> AbstractContextManager[States]:
    """Each layer's states go where the next one's belong."""
    rooms = [*out.values()]
    return capture_states(model, layers, dict(zip(layers, [*rooms[1:], rooms[0]], strict=True)))


def the_layer_before(model: Any, layers: Sequence[int], out: States) -> AbstractContextManager[States]:
    """Layer 0 in the place of layer 1: an input for an output."""
    shifted = {max(0, layer - 1) if layer > 0 else layer: room for layer, room in out.items()}
    return capture_states(model, [*shifted], shifted)


class RowsFurther(KeptStates):
    def take(self, session: int, first: int, states: Any, rows: slice) -> None:
        shifted = {layer: each.roll(-1, 0) for layer, each in states.items()}
        super().take(session, first, shifted, rows)


class OfTheSessionBefore(KeptStates):
    """Rows in the order of sessions, not of the plan."""

    def take_packed(self, plan: StepPlan, states: Any) -> None:
        super().take_packed(StepPlan(tuple(sorted(plan.items, key=lambda item: -item.session))), states)


@pytest.mark.parametrize("mutant", [a_layer_further, the_layer_before, RowsFurther, OfTheSessionBefore])
def test_the_comparison_notices(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Beside(static(), eager())
    if isinstance(mutant, type):
        both.static._states = mutant()
    else:
        monkeypatch.setattr(static_engine, "capture_states", mutant)
    with Differ:
        both.run()


def test_rows_of_half_precision_are_as_the_layers_have_them() -> None:
    """bfloat16: what the ragged engine keeps, up to the rounding of other products."""
    own = tiny.static(model_of("llama").to(torch.bfloat16), SETTINGS)
    assert own._static.states.dtype == torch.bfloat16
    rows = []
    for engine in (own, eager()):
        opened(engine, 40, NEEDS)
        engine.step(StepPlan((StepItem(0, 0, tuple(range(1, 12))),)))
        rows.append(engine.features(0).copy())
    assert np.abs(rows[0] - rows[1]).max() < 0.05 * np.abs(rows[1]).max()
