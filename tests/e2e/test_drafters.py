"""Every kind of drafter through all three services: it reads the features that it is to read, and no text changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draft_service import scheduler
from draft_service.drafters.catalogue import build_catalogue
from draft_service.drafters.model import ModelDraft, ModelDrafter
from paceline.client import AsyncClient, Generation
from paceline.drafters.formats.kinds import kind_of, load_onto
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.engine.features import FeatureEngine, FeatureRows
from paceline.engine.interface import Engine
from paceline.engine.loading import load_engine
from paceline.protocol.draft import DraftBudget
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import ROOT, Acceptance, Proposal
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import DraftConfig
from paceline.sampling import acceptance
from tests.drafters.formats.eagle_files import INPUTS
from tests.drafters.heads.lookahead_files import own_tensors, write
from tests.drafters.heads.tiny_mtp import HIDDEN, OWN_LAYERS, change, save_target
from tests.e2e.cluster import full
from tests.e2e.in_process import three_services
from tests.e2e.tiny_drafters import DRAFTERS, SETTINGS, services, target_model
from tests.services.harness import eventually

PROMPT = tuple(range(1, 25))
CHAIN = SpeculationSettings(drafter="model", num_draft_tokens=3)
TREE = SpeculationSettings(drafter="model", tree_widths=(3, 2), num_draft_tokens=2)
OFF = SpeculationSettings(off=True)
READ = {"eagle1": (-1,), "eagle3": INPUTS}
"""Layers whose states drafters read, and which of transformers' own those are."""


def request(speculation: SpeculationSettings, temperature: float) -> GenerateRequest:
    return GenerateRequest(
        token_ids=PROMPT,
        seed=5,
        max_new_tokens=16,
        ignore_eos=True,
        sampling=SamplingParams(temperature=temperature),
        speculation=speculation,
    )


def proposed(text: Generation) -> int:
    return sum(record.proposed for record in text.stats.records)


class NotingDrafter(ModelDrafter):
    """Notes the features that each session takes, and what it drafts."""

    def __init__(self, engine: FeatureEngine, prefill_chunk: int) -> None:
        super().__init__(engine, prefill_chunk)
        self.features: dict[int, dict[int, FeatureRows]] = {}
        self.drafts: list[ModelDraft] = []

    def take_features(self, session: int, first_position: int, rows: FeatureRows) -> None:
        super().take_features(session, first_position, rows)
        self.features.setdefault(session, {}).update(enumerate(rows, start=first_position))

    def begin(self, session: int, budget: DraftBudget, proposal_id: int) -> ModelDraft:
        self.drafts.append(super().begin(session, budget, proposal_id))
        return self.drafts[-1]


def check_features(features: dict[int, FeatureRows], text: Sequence[int], layers: Sequence[int]) -> None:
    """They are the hidden states that transformers computes, from the first token on."""
    with torch.no_grad():
        states = target_model()(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[each][0] for each in layers], dim=-1).numpy()
    assert sorted(features) == [*range(len(features))]
    assert len(features) >= len(PROMPT)
    for position, row in features.items():
        # float16 on the wire.
        np.testing.assert_allclose(row, expected[position], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("drafter", "temperature", "static"),
    [
        *((name, 0.8, False) for name in DRAFTERS),
        ("eagle3", 0.0, False),
        *(full(name, 0.0, False) for name in DRAFTERS if name != "eagle3"),
        full("eagle3", 0.8, True),
    ],
)
async def test_no_text_changes_and_what_is_drawn_is_what_q_says(
    drafter: str, temperature: float, static: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`static`: the target's engine is the one that GPUs have."""
    async with services(DRAFTERS[drafter], tmp_path, NotingDrafter, static=static) as (client, noting):
        alone = await client.generate(request(OFF, temperature))
        for speculation in (CHAIN, TREE):
            drafted = await client.generate(request(speculation, temperature))
            assert drafted.token_ids == alone.token_ids
            assert proposed(drafted)
            if drafter in READ:
                features = noting.features[max(noting.features)]
                check_features(features, (*PROMPT, *drafted.token_ids), READ[drafter])
        for rule in (Acceptance.REJECTION, Acceptance.BLOCK):
            assert proposed(await client.generate(replace(request(CHAIN, temperature), acceptance=rule)))
        await eventually(lambda: noting._engine.kv_rows == 0, "the drafter keeps no rows of texts that have ended")
    assert "mistake" not in caplog.text, "the coordinator has drawn each token again from the q that came with it"


def echoing_heads(folder: Path, target: TargetWeights) -> Engine:
    """Medusa's heads that leave the target's hidden state as it is, under its own output."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in own_tensors(outputs=False).items()}
    kind = kind_of(write(folder, zeros, "medusa_lm_head.pt"))
    assert kind is not None
    return load_onto(kind, folder, target, SETTINGS)


async def test_heads_read_the_feature_before_the_last_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such heads say what the target said of the last token: that token, if they read the feature before it."""
    monkeypatch.setattr(scheduler, "ROUND_PATIENCE_S", 60.0)
    async with services(echoing_heads, tmp_path, NotingDrafter) as (client, noting):
        await client.generate(request(CHAIN, 0.0))
        said = [(draft.branch.root, draft.proposal().token_ids) for draft in noting.drafts]
        behind_prompt = [(root.token, tokens) for root, tokens in said if root.position >= len(PROMPT) and tokens]
        assert len(behind_prompt) >= 4
        assert all(set(tokens) == {root} for root, tokens in behind_prompt)


def walk_to_any_child(proposal: Proposal, target_tokens: Sequence[int]) -> int:
    """Accepts what was drafted, whatever the target says."""
    return 0 if len(proposal) else ROOT


@pytest.mark.parametrize(("drafter", "temperature"), [("medusa", 0.0), full("exit", 0.8)])
async def test_a_text_that_is_not_the_targets_is_noticed(
    drafter: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with services(DRAFTERS[drafter], tmp_path, ModelDrafter) as (client, _):
        alone = await client.generate(request(OFF, temperature))
        monkeypatch.setattr(acceptance, "coupled_walk", walk_to_any_child)
        drafted = await client.generate(request(CHAIN, temperature))
        assert proposed(drafted)
        assert drafted.token_ids != alone.token_ids


JOINING = f"model.layers.{OWN_LAYERS}.eh_proj.weight"
OFTEN = 5
"""Accepted tokens of sixteen; by chance one in a hundred is."""


@asynccontextmanager
async def with_own_mtp(target: Path) -> AsyncIterator[AsyncClient]:
    """Target and drafter are loaded from the same folder, as they are where they serve."""
    config = DraftConfig(drafters=("model:mtp",), target_model=str(target), engine=SETTINGS)
    with pytest.MonkeyPatch.context() as unmeasured:
        unmeasured.setattr(ModelDrafter, "measure", lambda drafter: None)  # seconds, of no use here
        drafter = build_catalogue(config).pick("")
    assert isinstance(drafter, ModelDrafter)
    async with three_services(load_engine(str(target), SETTINGS), drafter, model=str(target)) as client:
        yield client


def accepted(text: Generation) -> int:
    return sum(record.accepted for record in text.stats.records)


@pytest.mark.parametrize("layout", ["glm4_moe", full("deepseek_v3"), full("deepseek_v32"), full("qwen3_next")])
async def test_no_text_changes_and_tokens_of_the_targets_own_mtp_are_accepted(layout: str, tmp_path: Path) -> None:
    async with with_own_mtp(save_target(tmp_path, layout)) as client:
        for temperature in (0.0, 0.8):
            alone = await client.generate(request(OFF, temperature))
            for speculation in (CHAIN, TREE):
                drafted = await client.generate(request(speculation, temperature))
                assert drafted.token_ids == alone.token_ids
                assert accepted(drafted) >= OFTEN


@pytest.mark.parametrize("layout", [full("deepseek_v32"), "qwen3_next"])
async def test_an_aligned_prediction_is_accepted(layout: str, tmp_path: Path) -> None:
    async with with_own_mtp(save_target(tmp_path, layout, faint=0.0)) as client:
        for temperature in (0.0, 0.8):
            drafted = await client.generate(request(CHAIN, temperature))
            assert accepted(drafted) >= 0.95 * proposed(drafted) > OFTEN


async def test_halves_joined_the_other_way_round_are_noticed(tmp_path: Path) -> None:
    """Acceptance tells that embedding and hidden state are read as they are meant to be; the text stays the same."""
    joining = load_file(save_target(tmp_path, "glm4_moe") / "model.safetensors")[JOINING]
    swapped = torch.cat((joining[:, HIDDEN:], joining[:, :HIDDEN]), dim=1)
    change(tmp_path, lambda name: name != JOINING, {JOINING: swapped})
    async with with_own_mtp(tmp_path) as client:
        alone, drafted = [await client.generate(request(speculation, 0.0)) for speculation in (OFF, CHAIN)]
    assert drafted.token_ids == alone.token_ids
    assert accepted(drafted) < OFTEN
