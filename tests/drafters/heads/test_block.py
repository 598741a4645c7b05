"""Block drafting behind the engine interface, held to its published definition."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.drafters.formats.dflash import is_dflash, load_dflash, load_dflash_engine
from paceline.drafters.formats.draft_files import read_config
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.block import build_block_engine
from paceline.drafters.heads.block_network import Sight
from paceline.engine.features import FeatureEngine
from paceline.engine.interface import Logits, StepItem, StepPlan
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.proposal import ROOT
from paceline.runtime.config import EngineSettings
from paceline_training.block import blocks_of_text
from tests.drafters.heads.tiny_block import HIDDEN, OUTPUTS, SIZE, BlockDefinition, save_target, write_block
from tests.engine.tiny import chain, step

SETTINGS = EngineSettings(threads=1, device="cpu")
PROMPT = tuple(random.Random(3).choices(range(2, 250), k=9))
FEATURES = torch.randn((64, len(OUTPUTS) * HIDDEN), generator=torch.Generator().manual_seed(5))
"""The target's, by position."""
TOLERANT = {"proposal_methods": [{"accept_tolerance": 0.1}]}
LAYOUTS = ("z-lab", "windows", "speculators", "from the anchor", "own vocabulary")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetWeights:
    return TargetWeights.load(str(save_target(tmp_path_factory.mktemp("target"))), SETTINGS)


@pytest.fixture(scope="module")
def tensors(target: TargetWeights) -> dict[str, torch.Tensor]:
    return load_file(Path(target.source.location) / "model.safetensors")


@pytest.fixture(params=LAYOUTS)
def pair(
    request: pytest.FixtureRequest, target: TargetWeights, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> tuple[FeatureEngine, BlockDefinition]:
    definition = write_block(tmp_path, tensors, request.param)
    assert is_dflash(read_config(tmp_path))
    return load_dflash_engine(tmp_path, target, SETTINGS), definition


def give(engine: FeatureEngine, first: int, end: int, session: int = 1) -> None:
    engine.give(session, first, FEATURES[first:end].numpy())


def same(found: Logits, definition: BlockDefinition, path: tuple[int, ...], given: int) -> bool:
    expected = definition.logits(path, FEATURES[:given])
    if expected is None:
        return not found.any()
    known = expected.numpy() != 0  # zeros are ids that its own head lacks
    close = np.abs(found[known] - expected.numpy()[known]).max() <= 1e-3 * max(1.0, float(expected.abs().max()))
    return bool(close and np.isneginf(found[~known]).all())


def test_a_block_tells_every_row_of_its_reach_and_none_behind_it(pair: tuple[FeatureEngine, BlockDefinition]) -> None:
    engine, definition = pair
    assert engine.need.layers == OUTPUTS
    assert engine.reach == SIZE - (not definition.from_first)
    engine.open(1, 32)
    give(engine, 0, 4)
    logits = step(engine, chain(1, 0, PROMPT))
    for row in range(4, 9):
        assert same(logits[row], definition, PROMPT[: row + 1], 4), row
    assert not logits[4 + SIZE :].any()
    engine.close(1)
    assert engine.kv_rows == 0


def test_trees_rollbacks_and_features_that_come_later(pair: tuple[FeatureEngine, BlockDefinition]) -> None:
    engine, definition = pair
    engine.open(1, 40)
    give(engine, 0, 8)
    step(engine, StepItem(1, 0, PROMPT))
    tree = StepItem(1, 9, (10, 11, 12, 13), (ROOT, ROOT, 0, 1), logit_rows=(0, 1, 3))
    for row, path in zip(step(engine, tree), ((10,), (11,), (11, 13)), strict=True):
        assert same(row, definition, (*PROMPT, *path), 8)
    give(engine, 8, 10)
    (row,) = step(engine, StepItem(1, 11, (20,), kept_rows=(10, 12), logit_rows=(0,)))
    assert same(row, definition, (*PROMPT, 11, 13, 20), 10)


def test_a_session_asks_for_one_pass_and_sessions_do_not_mix(
    pair: tuple[FeatureEngine, BlockDefinition], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, definition = pair
    network: Any = engine._network  # type: ignore[attr-defined]
    passes: list[int] = []
    plain = network.outputs

    def counted(first: torch.Tensor, *rest: Any) -> torch.Tensor:
        passes.append(len(first))
        found: torch.Tensor = plain(first, *rest)
        return found

    monkeypatch.setattr(network, "outputs", counted)
    for session in (1, 2):
        engine.open(session, 20)
    give(engine, 0, 4, session=1)
    give(engine, 0, 8, session=2)
    items = (StepItem(1, 0, PROMPT[:5], logit_rows=(4,)), StepItem(2, 0, PROMPT, logit_rows=(8,)))
    one, two = engine.step(StepPlan(items))
    assert same(one[0], definition, PROMPT[:5], 4)
    assert same(two[0], definition, PROMPT, 8)
    one, two = engine.step(StepPlan((chain(1, 5, (7, 8)), chain(2, 9, (9, 10)))))
    assert same(one[1], definition, (*PROMPT[:5], 7, 8), 4)
    assert same(two[1], definition, (*PROMPT, 9, 10), 8)
    assert passes == [2]


def test_what_is_trained_is_what_is_served(pair: tuple[FeatureEngine, BlockDefinition]) -> None:
    engine, _ = pair
    network: Any = engine._network  # type: ignore[attr-defined]
    engine.open(1, 20)
    give(engine, 0, 8)
    served = [step(engine, chain(1, 0, PROMPT[: last + 1])).copy() for last in (3, 8)]
    first = torch.tensor([3, 8])
    with torch.no_grad():
        attend = blocks_of_text(network, FEATURES[:8], first)
        logits = network.logits(network.outputs(torch.tensor([PROMPT[3], PROMPT[8]]), first, attend))
    place = SIZE - network.form.tokens
    for block, rows in enumerate(served):
        known = np.isfinite(rows[-1])
        np.testing.assert_allclose(rows[-1][known], logits[block, place].numpy(), rtol=0, atol=1e-4)


def _form(**changes: Any) -> Callable[[Any], None]:
    return lambda network: setattr(network, "form", replace(network.form, **changes))


def _no_last_norm(network: Any) -> None:
    weight = network.norm.weight
    network.norm = nn.Identity()
    network.norm.weight = weight


BUGS: dict[str, Callable[[Any], None]] = {
    "another mask": _form(mask_token=5),
    "tokens one place on": _form(from_first=True),
    "blocks that see no token ahead": _form(sights=(Sight(causal=True),) * 2),
    "the context's norm": lambda network: setattr(network, "hidden_norm", nn.Identity()),
    "the last norm": _no_last_norm,
    "the keys' norm": lambda network: setattr(network.layers[1].self_attn, "k_norm", nn.Identity()),
    "features one too late": lambda network: None,
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(
    bug: str, target: TargetWeights, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    definition = write_block(tmp_path, tensors, "z-lab")
    draft = load_dflash(tmp_path, target, SETTINGS)
    BUGS[bug](draft.network)
    engine = build_block_engine(draft, target.tokenizer, SETTINGS, "tiny")
    engine.open(1, 20)
    late = bug == "features one too late"
    engine.give(1, 0, FEATURES[late : 4 + late].numpy())
    assert not same(step(engine, chain(1, 0, PROMPT[:6]))[-1], definition, PROMPT[:6], 4)


@pytest.mark.parametrize(
    ("layout", "changes", "error", "said"),
    [
        ("speculators", {"speculators_model_type": "dflash2"}, Unsupported, "speculators_model_type = dflash2"),
        ("speculators", {"projector_type": "domino"}, Unsupported, "projector_type = domino"),
        ("z-lab", {"selector_rank": 4}, Unsupported, "selector_rank = 4"),
        ("speculators", {"speculators_config": TOLERANT}, Unsupported, "accept_tolerance = 0.1"),
        ("z-lab", {"num_target_layers": 36}, InvalidInput, "num_target_layers = 36"),
        ("z-lab", {"dflash_config": {"target_layer_ids": [0, 4]}}, InvalidInput, r"target_layer_ids = \(0, 4\)"),
        ("z-lab", {"block_size": 1}, InvalidInput, "block_size = 1"),
        ("speculators", {"mask_token_id": 258}, InvalidInput, "mask_token_id = 258"),
        ("speculators", {"target_hidden_size": 64}, InvalidInput, "width of a feature = 64"),
        ("speculators", {"aux_hidden_state_layer_ids": [1, 2, 3]}, InvalidInput, "tensors of another shape: 1"),
        ("own vocabulary", {"draft_vocab_size": 50}, InvalidInput, "d2t"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    layout: str,
    changes: dict[str, Any],
    error: type[Exception],
    said: str,
    target: TargetWeights,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    write_block(tmp_path, tensors, layout, **changes)
    with pytest.raises(error, match=said):
        load_dflash(tmp_path, target, SETTINGS)
