"""Medusa's heads through all three services: they read the feature that they are meant to, and no text changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from draft_service import feature_waits
from draft_service.drafters.model import ModelDraft, ModelDrafter
from paceline.client import AsyncClient
from paceline.drafters.formats.kinds import kind_of, load_kind
from paceline.engine.decoder import build_engine
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.draft import DraftBudget
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import EngineSettings
from tests.drafters.heads.lookahead_files import own_tensors, write
from tests.e2e.test_features import coordinator
from tests.engine import tiny
from tests.models.saving import save_with_tokenizer
from tests.services.harness import draft_service, target_service

SETTINGS = EngineSettings(threads=1, device="cpu")
PROMPT = tuple(range(1, 20))
TREE = SpeculationSettings(drafter="model", tree_widths=(2, 2), num_draft_tokens=2)


class NotingMedusa(ModelDrafter):
    """Notes what it drafts."""

    drafts: list[ModelDraft]

    def begin(self, session: int, budget: DraftBudget, proposal_id: int) -> ModelDraft:
        self.drafts.append(super().begin(session, budget, proposal_id))
        return self.drafts[-1]


@asynccontextmanager
async def _services(folder: Path) -> AsyncIterator[tuple[AsyncClient, NotingMedusa]]:
    """Heads that leave the target's hidden state as it is, under its own output."""
    model = tiny.random_model(tiny.llama())
    save_with_tokenizer(model, folder / "target")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in own_tensors(outputs=False).items()}
    heads = write(folder / "heads", zeros, "medusa_lm_head.pt")
    kind = kind_of(heads)
    assert kind is not None
    engine = load_kind(kind, heads, str(folder / "target"), SETTINGS)
    drafter = NotingMedusa(engine, prefill_chunk=16)
    drafter.drafts = []
    tokenizer = str(folder / "target")
    target = build_engine(model, load_tokenizer(tokenizer), SETTINGS, "tiny")
    async with (
        target_service(target) as (_, target_address),
        draft_service(engine, drafter=drafter) as (_, draft_address),
        coordinator(target_address, draft_address, model=tokenizer) as client,
    ):
        yield client, drafter


def _request(speculation: SpeculationSettings, temperature: float = 0.0) -> GenerateRequest:
    sampling = SamplingParams(temperature=temperature)
    return GenerateRequest(
        token_ids=PROMPT, seed=5, max_new_tokens=16, ignore_eos=True, sampling=sampling, speculation=speculation
    )


async def test_heads_read_the_feature_before_the_last_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such heads say what the target said of the last token: that token, if they read the feature before it."""
    monkeypatch.setattr(feature_waits, "ROUND_PATIENCE_S", 60.0)
    async with _services(tmp_path) as (client, drafter):
        alone = await client.generate(_request(SpeculationSettings(off=True)))
        drafter.drafts.clear()
        chain = await client.generate(_request(SpeculationSettings(drafter="model", num_draft_tokens=3)))
        assert chain.token_ids == alone.token_ids
        said = [(draft.branch.root, draft.proposal().token_ids) for draft in drafter.drafts]
        behind_prompt = [(root.token, tokens) for root, tokens in said if root.position >= len(PROMPT) and tokens]
        assert len(behind_prompt) >= 4
        assert all(set(tokens) == {root} for root, tokens in behind_prompt)
        sampled = await client.generate(_request(SpeculationSettings(off=True), 0.8))
        assert (await client.generate(_request(TREE, 0.8))).token_ids == sampled.token_ids
