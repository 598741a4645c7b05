"""Every kind of drafter through all three services: no text changes, whatever it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.client import Generation
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import ROOT, Proposal
from paceline.protocol.sampling import SamplingParams
from paceline.sampling import acceptance
from tests.e2e.tiny_drafters import DRAFTERS, services
from tests.services.harness import eventually

CHAIN = SpeculationSettings(drafter="model", num_draft_tokens=3)
TREE = SpeculationSettings(drafter="model", tree_widths=(3, 2), num_draft_tokens=2)
OFF = SpeculationSettings(off=True)
ELSEWHERE = {("eagle1", 0.0), ("eagle3", 0.8), ("medusa", 0.0)}
"""In every run by tests of their own, which look at the features, too."""


def case(drafter: str, temperature: float) -> object:
    return pytest.param(drafter, temperature, marks=pytest.mark.full if (drafter, temperature) in ELSEWHERE else ())


CASES = [case(drafter, temperature) for drafter in DRAFTERS for temperature in (0.0, 0.8)]


def request(speculation: SpeculationSettings, temperature: float) -> GenerateRequest:
    return GenerateRequest(
        token_ids=tuple(range(1, 25)),
        seed=5,
        max_new_tokens=16,
        ignore_eos=True,
        sampling=SamplingParams(temperature=temperature),
        speculation=speculation,
    )


def proposed(text: Generation) -> int:
    return sum(record.proposed for record in text.stats.records)


@pytest.mark.parametrize(("drafter", "temperature"), CASES)
async def test_no_text_changes(drafter: str, temperature: float, tmp_path: Path) -> None:
    async with services(drafter, tmp_path) as (client, engine):
        alone = await client.generate(request(OFF, temperature))
        for speculation in (CHAIN, TREE):
            drafted = await client.generate(request(speculation, temperature))
            assert drafted.token_ids == alone.token_ids
            assert proposed(drafted)
        await eventually(lambda: engine.kv_rows == 0, "the drafter keeps no rows of texts that have ended")


def walk_to_any_child(proposal: Proposal, target_tokens: Sequence[int]) -> int:
    """Accepts what was drafted, whatever the target says."""
    return 0 if len(proposal) else ROOT


@pytest.mark.parametrize(("drafter", "temperature"), [("medusa", 0.0), ("exit", 0.8)])
async def test_a_text_that_is_not_the_targets_is_noticed(
    drafter: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with services(drafter, tmp_path) as (client, _):
        alone = await client.generate(request(OFF, temperature))
        monkeypatch.setattr(acceptance, "coupled_walk", walk_to_any_child)
        drafted = await client.generate(request(CHAIN, temperature))
        assert proposed(drafted)
        assert drafted.token_ids != alone.token_ids
