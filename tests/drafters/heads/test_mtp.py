"""Multi-token prediction behind the engine interface, held to its published definition."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.drafters.formats.mtp import find_mtp, load_mtp
from paceline.drafters.heads.mtp import MtpNetwork, build_mtp_engine
from paceline.engine.features import FeatureEngine
from paceline.engine.interface import Logits, StepItem, StepPlan
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.features import FINAL
from paceline.protocol.proposal import ROOT
from paceline.runtime.config import EngineSettings
from tests.drafters.heads import tiny_mtp
from tests.drafters.heads.tiny_mtp import HIDDEN, Definition
from tests.engine.tiny import VOCAB, chain, step

SETTINGS = EngineSettings(threads=1, device="cpu")
TOLERANCE = 2e-3
"""Of logits tens of units large; what is wrong moves them by whole units."""
PROMPT = tuple(random.Random(3).choices(range(VOCAB), k=9))
FEATURES = torch.randn((64, HIDDEN), generator=torch.Generator().manual_seed(5)) * 2
"""The target's, by position."""


PAIRS: list[Any] = ["deepseek_v3", "deepseek_v32", "qwen3_next", "speculators", "glm4_moe of 2", "mimo of 3"]
PAIRS += [pytest.param(name, marks=pytest.mark.full) for name in ("glm4_moe", "mimo")]


def serve(network: MtpNetwork) -> FeatureEngine:
    engine = build_mtp_engine(network, TableTokenizer(VOCAB, None), SETTINGS, "tiny")
    assert isinstance(engine, FeatureEngine)
    return engine


def loaded(folder: Path) -> MtpNetwork:
    return load_mtp(find_mtp(folder), SETTINGS)


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[MtpNetwork, Definition]:
    folder = tmp_path_factory.mktemp("mtp")
    name, _, depths = request.param.partition(" of ")
    definition = tiny_mtp.write(folder, name, int(depths or 1))
    return loaded(folder), definition


def give(engine: FeatureEngine, first: int, end: int, session: int = 1) -> None:
    engine.give(session, first, FEATURES[first:end].numpy())


def same(found: Logits, definition: Definition, path: tuple[int, ...], given: int) -> bool:
    expected = definition.logits(path, FEATURES[:given]).numpy()
    return bool(np.abs(found - expected).max() <= TOLERANCE * max(1.0, np.abs(expected).max()))


def test_every_row_of_a_prompt_is_by_definition_however_it_is_cut(pair: tuple[MtpNetwork, Definition]) -> None:
    network, definition = pair
    engine = serve(network)
    assert engine.need.layers == (FINAL,)
    engine.open(1, 32)
    give(engine, 0, len(PROMPT) - 1)
    base = 0
    for size in (4, 1, 4):
        logits = step(engine, chain(1, base, PROMPT[base : base + size]))
        for row in range(size):
            path = PROMPT[: base + row + 1]
            assert len(path) < 2 or same(logits[row], definition, path, len(path) - 1), path
        base += size
    engine.close(1)
    assert engine.kv_rows == 0


def test_drafts_go_on_from_their_own_output_in_chains_and_trees(pair: tuple[MtpNetwork, Definition]) -> None:
    network, definition = pair
    engine = serve(network)
    engine.open(1, 40)
    given = len(PROMPT) - 1
    give(engine, 0, given)
    step(engine, chain(1, 0, PROMPT))
    # Parents are new in the same step, so its rows come one after the other.
    tree = StepItem(1, 9, (10, 11, 12, 13, 14), (ROOT, ROOT, 0, 1, 3), logit_rows=(1, 2, 4))
    for row, path in zip(step(engine, tree), ((11,), (10, 12), (11, 13, 14)), strict=True):
        assert same(row, definition, (*PROMPT, *path), given), path
    # The kept tree grows behind what stays of it.
    grown = StepItem(1, 12, (20, 21), (ROOT, 0, 1, 2, 1), (10, 12, 13), logit_rows=(0, 1), trunk_length=9)
    for row, path in zip(step(engine, grown), ((11, 13, 14, 20), (11, 13, 21)), strict=True):
        assert same(row, definition, (*PROMPT, *path), given)
    engine.close(1)


def test_rolled_back_rows_read_the_target_once_it_is_known(pair: tuple[MtpNetwork, Definition]) -> None:
    network, definition = pair
    engine = serve(network)
    engine.open(1, 40)
    give(engine, 0, 8)
    path = (*PROMPT, 30, 31, 32)
    assert same(step(engine, chain(1, 0, path))[-1], definition, path, 8)
    give(engine, 8, 11)
    logits = step(engine, chain(1, 9, path[9:]))
    for row in range(3):
        assert same(logits[row], definition, path[: 10 + row], 9 + row)
    engine.close(1)


def test_sessions_of_one_step_do_not_mix(pair: tuple[MtpNetwork, Definition]) -> None:
    network, definition = pair
    engine = serve(network)
    other = PROMPT[::-1]
    for session in (1, 2):
        engine.open(session, 20)
    give(engine, 0, 4, session=1)
    give(engine, 0, 8, session=2)
    one, two = engine.step(StepPlan((chain(1, 0, PROMPT[:7]), chain(2, 0, other))))
    assert same(one[-1], definition, PROMPT[:7], 4)
    assert same(two[-1], definition, other, 8)


def _swapped(network: MtpNetwork) -> None:
    for fusion in network.fusions:
        fusion._embedding_first = not fusion._embedding_first  # type: ignore[assignment]


def _other_blank(network: MtpNetwork) -> None:
    network.form = dataclasses.replace(network.form, blank_first=not network.form.blank_first)


def _without(part: str) -> Callable[[MtpNetwork], None]:
    def drop(network: MtpNetwork) -> None:
        for fusion in network.fusions:
            setattr(fusion, part, nn.Identity())

    return drop


def _no_last_norm(network: MtpNetwork) -> None:
    network.norms = nn.ModuleList([nn.Identity() for _ in network.norms])


BUGS: dict[str, Callable[[MtpNetwork], None]] = {
    "the order of joining": _swapped,
    "the first token's embedding": _other_blank,
    "the embedding's norm": _without("embedding_norm"),
    "the hidden state's norm": _without("hidden_norm"),
    "the last norm": _no_last_norm,
    "features one too late": lambda network: None,
}


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        pytest.param(name, bug, marks=[pytest.mark.full] * ((at - place) % 6 not in (0, 4)))  # two of each in CI
        for at, name in enumerate(tiny_mtp.LAYOUTS)
        for place, bug in enumerate(BUGS)
    ],
)
def test_the_comparison_notices(name: str, bug: str, tmp_path: Path) -> None:
    definition = tiny_mtp.write(tmp_path, name)
    network = loaded(tmp_path)
    BUGS[bug](network)
    engine = serve(network)
    engine.open(1, 20)
    late = bug == "features one too late"
    engine.give(1, 0, FEATURES[late : 8 + late].numpy())
    assert not same(step(engine, chain(1, 0, PROMPT[:4]))[-1], definition, PROMPT[:4], 3)
