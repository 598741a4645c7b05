"""Multi-token prediction of the target's own checkpoint through all services: often right, and no text changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draft_service.drafters.catalogue import build_catalogue
from draft_service.drafters.model import ModelDrafter
from paceline.client import AsyncClient, Generation
from paceline.engine.loading import load_engine
from paceline.runtime.config import DraftConfig, EngineSettings
from tests.drafters.heads.tiny_mtp import HIDDEN, OWN_LAYERS, change, save_target
from tests.e2e.cluster import full
from tests.e2e.in_process import three_services
from tests.e2e.test_drafters import CHAIN, OFF, TREE, request

SETTINGS = EngineSettings(threads=1, device="cpu", kv_bytes=1 << 22)
JOINING = f"model.layers.{OWN_LAYERS}.eh_proj.weight"
OFTEN = 5
"""Accepted tokens of sixteen; by chance one in a hundred is."""


@asynccontextmanager
async def services(target: Path) -> AsyncIterator[AsyncClient]:
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
async def test_no_text_changes_and_tokens_are_accepted(layout: str, tmp_path: Path) -> None:
    async with services(save_target(tmp_path, layout)) as client:
        for temperature in (0.0, 0.8):
            alone = await client.generate(request(OFF, temperature))
            for speculation in (CHAIN, TREE):
                drafted = await client.generate(request(speculation, temperature))
                assert drafted.token_ids == alone.token_ids
                assert accepted(drafted) >= OFTEN


@pytest.mark.parametrize("layout", [full("deepseek_v32"), "qwen3_next"])
async def test_an_aligned_prediction_is_accepted(layout: str, tmp_path: Path) -> None:
    async with services(save_target(tmp_path, layout, faint=0.0)) as client:
        for temperature in (0.0, 0.8):
            drafted = await client.generate(request(CHAIN, temperature))
            proposed = sum(record.proposed for record in drafted.stats.records)
            assert accepted(drafted) >= 0.95 * proposed > OFTEN


async def test_halves_joined_the_other_way_round_are_noticed(tmp_path: Path) -> None:
    """Acceptance tells that embedding and hidden state are read as they are meant to be; the text stays the same."""
    joining = load_file(save_target(tmp_path, "glm4_moe") / "model.safetensors")[JOINING]
    swapped = torch.cat((joining[:, HIDDEN:], joining[:, :HIDDEN]), dim=1)
    change(tmp_path, lambda name: name != JOINING, {JOINING: swapped})
    async with services(tmp_path) as client:
        alone, drafted = [await client.generate(request(speculation, 0.0)) for speculation in (OFF, CHAIN)]
    assert drafted.token_ids == alone.token_ids
    assert accepted(drafted) < OFTEN
