"""Under rejection and block acceptance the text has the target's distribution, whatever kind of drafter drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.drafters.model import ModelDrafter
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.sampling import acceptance as rules
from tests.e2e.statistics import LEVEL, Tokens, chi_square_p
from tests.e2e.tiny_drafters import DRAFTERS, services, target_model
from tests.sampling import plain

PROMPT = tuple(range(1, 12))
LENGTH, CHOICES, SAMPLES, AT_ONCE = 4, 3, 600, 4
SAMPLING = SamplingParams(temperature=1.2, top_k=CHOICES)


def enumerate_texts(temperature: float) -> dict[Tokens, float]:
    """The chance of every text, as transformers computes it."""
    model: Any = target_model()

    @torch.no_grad()
    def row(text: Tokens) -> list[float]:
        logits = model(torch.tensor([[*PROMPT, *text]])).logits[0, -1]
        best, ids = (logits / temperature).topk(CHOICES)
        chances: list[float] = torch.zeros_like(logits).scatter(0, ids, best.softmax(-1)).tolist()
        return chances

    return plain.texts(row, LENGTH)


async def _sampled(drafter: str, folder: Path, acceptance: Acceptance) -> Sequence[Tokens]:
    speculation = SpeculationSettings(drafter="model", num_draft_tokens=2)
    slots = asyncio.Semaphore(AT_ONCE)
    async with services(DRAFTERS[drafter], folder, ModelDrafter) as (client, _):

        async def one(seed: int) -> tuple[Tokens, int]:
            async with slots:
                made = GenerateRequest(
                    token_ids=PROMPT,
                    seed=seed,
                    max_new_tokens=LENGTH,
                    ignore_eos=True,
                    sampling=SAMPLING,
                    acceptance=acceptance,
                    speculation=speculation,
                )
                found = await client.generate(made)
                return found.token_ids, sum(record.proposed for record in found.stats.records)

        drawn = await asyncio.gather(*(one(seed) for seed in range(SAMPLES)))
    assert sum(proposed for _, proposed in drawn) > SAMPLES / 2, "what is not proposed shows nothing"
    return [tokens for tokens, _ in drawn]


@pytest.mark.full
@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK])
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_the_text_has_the_distribution_that_transformers_computes(
    drafter: str, acceptance: Acceptance, tmp_path: Path
) -> None:
    texts = await _sampled(drafter, tmp_path, acceptance)
    assert chi_square_p(texts, enumerate_texts(SAMPLING.temperature)) > LEVEL
    assert chi_square_p(texts, enumerate_texts(0.3)) < LEVEL, "the samples suffice to tell another distribution"


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["medusa", "exit"])
async def test_proposals_that_are_accepted_unseen_are_noticed(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "rejection_length", lambda draws, p, q: len(draws))
    texts = await _sampled(drafter, tmp_path, Acceptance.REJECTION)
    assert chi_square_p(texts, enumerate_texts(SAMPLING.temperature)) < LEVEL
