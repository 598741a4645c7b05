"""EAGLE's engine on checkpoints in published layouts, held to the published definition row by row."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from paceline.drafters.formats import eagle_parts
from paceline.drafters.formats.eagle import load_eagle
from paceline.drafters.formats.speculators_eagle3 import load_speculators_eagle3
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.eagle_rows import EagleDraft, build_eagle_rows
from paceline.drafters.heads.own_features import OwnFeaturesEngine
from paceline.engine.interface import StepItem, StepPlan
from paceline.protocol.errors import InvalidInput
from paceline.protocol.features import FINAL, FeatureNeed
from paceline.protocol.proposal import ROOT
from tests.drafters.formats import eagle_files
from tests.drafters.formats.eagle_files import DRAFT_IDS, HIDDEN, INPUTS, LLAMA, SETTINGS, Tensors
from tests.drafters.formats.published_eagle import Published
from tests.engine import tiny

TOLERANCE = 1e-4
"""As a share of the largest logit; a wrong row moves them by more than 1e-2 of it."""
TEXT = random.Random(1).choices(range(tiny.VOCAB), k=12)


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the definition of its network."""

    folder: Path
    published: Published
    inputs: tuple[int, ...] = INPUTS
    draft_ids: tuple[int, ...] = DRAFT_IDS
    speculators: bool = False

    def draft(self, target: TargetWeights) -> EagleDraft:
        load = load_speculators_eagle3 if self.speculators else load_eagle
        return load(self.folder, target, SETTINGS)


Maker = Callable[[Path, Tensors], Case]
"""From an empty folder and the target's tensors."""


def _eagle1(folder: Path, target: Tensors, *, bias: bool = True, pickled: bool = False) -> Case:
    tensors = eagle_files.eagle1_tensors(bias=bias)
    config = LLAMA if bias else {**LLAMA, "bias": False}
    eagle_files.write_draft(folder, config, tensors, pickled=pickled)
    published = Published({**tensors, "lm_head.weight": target["lm_head.weight"]}, third=False)
    return Case(folder, published, inputs=(), draft_ids=tuple(range(tiny.VOCAB)))


def _eagle3(folder: Path, _target: Tensors, **config: Any) -> Case:
    tensors = eagle_files.eagle3_tensors()
    given = {**LLAMA, "draft_vocab_size": len(DRAFT_IDS), "pretraining_tp": 1, **config}
    eagle_files.write_draft(folder, given, tensors)
    return Case(folder, Published(_renamed(tensors)))


def _same_vocabulary(folder: Path, _target: Tensors) -> Case:
    every = tuple(range(tiny.VOCAB))
    tensors = eagle_files.eagle3_tensors(draft_ids=every)
    eagle_files.write_draft(folder, {**LLAMA, "draft_vocab_size": tiny.VOCAB}, tensors)
    return Case(folder, Published(_renamed(tensors)), draft_ids=every)


def _listed_layers(folder: Path, target: Tensors, ids: Sequence[int], inputs: tuple[int, ...]) -> Case:
    config: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}
    return Case(folder, _eagle3(folder, target, **config).published, inputs=inputs)


def _speculators(folder: Path, target: Tensors, **changes: Any) -> Case:
    tensors = eagle_files.eagle3_tensors("layers.0")
    flags = {each: changes.get(each, False) for each in ("norm_before_residual", "norm_output")}
    made = eagle_files.RandomTensors(5)
    if changes.get("norm_before_fc"):
        made.add("input_norm.weight", 3 * HIDDEN)
    for index in range(3 if changes.get("fc_norm") else 0):
        made.add(f"fc_norm.{index}.weight", HIDDEN)
    tensors |= made.made
    del tensors["embed_tokens.weight"]
    eagle_files.write_draft(folder, eagle_files.speculators_config(**changes), tensors)
    own = {**tensors, "embed_tokens.weight": target["model.embed_tokens.weight"]}
    inputs = tuple(changes.get("eagle_aux_hidden_state_layer_ids") or INPUTS)
    return Case(folder, Published(own, **flags), inputs=inputs, speculators=True)


def _two_qwen3_layers(folder: Path, _target: Tensors) -> Case:
    tensors = eagle_files.eagle3_tensors("layers.0", head_dim=16, qk_norm=True)
    made = eagle_files.RandomTensors(6)
    made.add_layer("layers.1", HIDDEN, head_dim=16, qk_norm=True)
    made.add("layers.1.input_layernorm.weight", HIDDEN)
    tensors |= made.made
    layer = {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 16}
    eagle_files.write_draft(folder, eagle_files.speculators_config(layer), tensors)
    return Case(folder, Published(tensors), speculators=True)


def _renamed(tensors: Tensors) -> Tensors:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


MAKERS: dict[str, Maker] = {
    "EAGLE-1": _eagle1,
    "EAGLE-1 without bias, pickled": lambda folder, target: _eagle1(folder, target, bias=False, pickled=True),
    "EAGLE-3": _eagle3,
    "EAGLE-3, the target's vocabulary": _same_vocabulary,
    "layers by output": lambda folder, target: _listed_layers(folder, target, [1, 3, 6], (2, 4, 7)),
    "layers by input": lambda folder, target: _listed_layers(folder, target, [2, 3, 7], (2, 3, 7)),
    "speculators": _speculators,
    "norm_before_residual": lambda folder, target: _speculators(folder, target, norm_before_residual=True),
    "norm_before_fc": lambda folder, target: _speculators(folder, target, norm_before_fc=True),
    "fc_norm": lambda folder, target: _speculators(folder, target, fc_norm=True),
    "norm_output": lambda folder, target: _speculators(folder, target, norm_output=True),
    "own layers": lambda folder, target: _speculators(folder, target, eagle_aux_hidden_state_layer_ids=[0, 3, 7]),
    "two layers of Qwen 3": _two_qwen3_layers,
}


@dataclass(frozen=True)
class TinyTarget:
    """What a target knows of `TEXT`: `inputs` of every layer, then the last one's output behind the norm."""

    weights: TargetWeights
    tensors: Tensors
    inputs: tuple[torch.Tensor, ...]

    def by_input(self, inputs: Sequence[int]) -> torch.Tensor:
        """As the formats say it; none: the last, behind the norm."""
        return torch.cat([self.inputs[each] for each in inputs or (-1,)], dim=-1)

    def by_need(self, need: FeatureNeed) -> torch.Tensor:
        """As the target sends it."""
        return torch.cat([self.inputs[-1 if each == FINAL else each + 1] for each in need.layers], dim=-1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    weights = eagle_files.write_target(tmp_path_factory.mktemp("target"))
    model = tiny.random_model(eagle_files.target_config(), seed=7).eval()
    with torch.no_grad():
        inputs = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    assert len(inputs) == eagle_files.TARGET_LAYERS + 1
    return TinyTarget(weights, model.state_dict(), tuple(each[0] for each in inputs))


def _engine(draft: EagleDraft, target: TinyTarget) -> OwnFeaturesEngine:
    return OwnFeaturesEngine(build_eagle_rows(draft, target.weights.tokenizer, SETTINGS, "tiny-eagle"))


class Held:
    """A session of an engine whose logits are compared with the definition's."""

    def __init__(self, case: Case, target: TinyTarget) -> None:
        self.case, self.target = case, target
        self.draft = case.draft(target.weights)
        self.engine = _engine(self.draft, target)
        self.features = target.by_input(case.inputs)
        self.engine.open(1, 40)

    def give(self, start: int, end: int, shift: int = 0) -> None:
        rows = self.target.by_need(self.draft.need)[start:end]
        self.engine.give(1, start + shift, rows.numpy())

    def step(self, item: StepItem) -> np.ndarray:
        return tiny.step(self.engine, item)

    def assert_row(self, found: np.ndarray, path: Sequence[int], known: int) -> None:
        """Logits after a path, of which the target's features of the first `known` tokens were given."""
        outside = np.setdiff1d(np.arange(tiny.VOCAB), self.case.draft_ids)
        assert np.isneginf(found[outside]).all()
        expected = self.case.published.path(path, self.features[:known])[-1]
        margin = TOLERANCE * float(expected.abs().max())
        np.testing.assert_allclose(found[list(self.case.draft_ids)], expected.numpy(), atol=margin, rtol=0)


@pytest.fixture(params=list(MAKERS))
def held(request: pytest.FixtureRequest, tmp_path: Path, target: TinyTarget) -> Held:
    return Held(MAKERS[request.param](tmp_path / "draft", target.tensors), target)


def _prefix(held: Held) -> None:
    """Seven tokens in two chunks, the features of six of them given."""
    held.give(0, 6)
    for start, end, rows in ((0, 3, (1, 2)), (3, 7, (0, 3))):
        logits = held.step(StepItem(1, start, tuple(TEXT[start:end]), logit_rows=rows))
        for row, logits_row in zip(rows, logits, strict=True):
            held.assert_row(logits_row, TEXT[: start + row + 1], 6)


def test_chain_tree_rollback_and_replaced_features_are_as_published(held: Held) -> None:
    _prefix(held)
    a, b, c, d = 11, 12, 13, 14
    tree = StepItem(1, 7, (a, b, c, d), (ROOT, ROOT, 0, 2), logit_rows=(0, 1, 2, 3))  # c behind a, d behind c
    for row, path in zip(held.step(tree), ([a], [b], [a, c], [a, c, d]), strict=True):
        held.assert_row(row, TEXT[:7] + path, 6)
    # The accepted path goes on from the rows that are there, which read what their parents' rows yielded.
    logits = held.step(StepItem(1, 9, (20,), kept_rows=(7, 9), logit_rows=(0,)))
    held.assert_row(logits[0], [*TEXT[:7], a, c, 20], 6)
    # Now the text takes another path, and the target's features of it have come.
    held.give(6, 9)
    for end, row in enumerate(held.step(tiny.chain(1, 7, TEXT[7:11])), start=8):
        held.assert_row(row, TEXT[:end], 9)


def test_the_first_token_tells_nothing_and_is_seen_by_none(target: TinyTarget, tmp_path: Path) -> None:
    held = Held(_eagle3(tmp_path / "draft", target.tensors), target)
    logits = held.step(StepItem(1, 0, (5,), logit_rows=(0,)))
    assert set(np.unique(logits)) == {-np.inf, np.float32(0)}
    held.give(0, 1)
    other = held.step(StepItem(1, 1, (TEXT[1],), logit_rows=(0,)))
    held.assert_row(other[0], [TEXT[0], TEXT[1]], 1)  # 5 or TEXT[0]: the same
    with pytest.raises(InvalidInput, match="texts begin once"):
        held.step(StepItem(1, 0, (5, 6), (ROOT, ROOT)))


def test_two_sessions_share_a_step(target: TinyTarget, tmp_path: Path) -> None:
    held = Held(_eagle3(tmp_path / "draft", target.tensors), target)
    _prefix(held)
    held.engine.open(2, 20)
    held.engine.give(2, 0, target.by_need(held.draft.need)[:2].numpy())
    items = (StepItem(2, 0, tuple(TEXT[:5]), logit_rows=(4,)), StepItem(1, 7, (30, 31), logit_rows=(0, 1)))
    second, first = held.engine.step(StepPlan(items))
    held.assert_row(second[0], TEXT[:5], 2)
    held.assert_row(first[0], [*TEXT[:7], 30], 6)
    held.assert_row(first[1], [*TEXT[:7], 30, 31], 6)


def _shifted_features(held: Held) -> None:
    held.give = lambda start, end, shift=1: Held.give(held, start, end, shift)  # type: ignore[method-assign]


def _layers_off_by_one(held: Held) -> None:
    held.draft = EagleDraft(held.draft.network, FeatureNeed(tuple(each + 1 for each in held.draft.need.layers)))


def _d2t_as_ids(held: Held) -> None:
    with mock.patch.object(eagle_parts, "target_ids", lambda tensors, *_: tensors["d2t"].numpy()):
        held.draft = held.case.draft(held.target.weights)
    held.engine = _engine(held.draft, held.target)
    held.engine.open(1, 40)


@pytest.mark.parametrize("mutate", [_shifted_features, _layers_off_by_one, _d2t_as_ids])
def test_mutants_are_noticed(mutate: Callable[[Held], None], target: TinyTarget, tmp_path: Path) -> None:
    held = Held(_eagle3(tmp_path / "draft", target.tensors), target)
    mutate(held)
    with pytest.raises(AssertionError):
        _prefix(held)
