"""EAGLE through all three services: it is given the hidden states that transformers computes, and no text changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.model import ModelDrafter
from paceline.client import AsyncClient
from paceline.drafters.formats.kinds import kind_of
from paceline.engine.decoder import build_engine
from paceline.engine.features import FeatureEngine, FeatureRows
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from tests.drafters.formats import eagle_files
from tests.drafters.formats.eagle_files import DRAFT_IDS, INPUTS, LLAMA, SETTINGS
from tests.e2e.test_features import coordinator
from tests.engine import tiny
from tests.services.harness import draft_service, target_service

TOKENIZER = f"table:vocab={tiny.VOCAB}"
PROMPT = tuple(range(1, 25))
LENGTH = 24
CHAIN = SpeculationSettings(drafter="model", num_draft_tokens=3)
TREE = SpeculationSettings(drafter="model", tree_widths=(3, 2), num_draft_tokens=2)
OFF = SpeculationSettings(off=True)


class NotingDrafter(ModelDrafter):
    """Notes the features that each session takes."""

    def __init__(self, engine: FeatureEngine) -> None:
        super().__init__(engine, prefill_chunk=16)
        self.taken: dict[int, dict[int, FeatureRows]] = {}

    def take_features(self, session: int, first_position: int, rows: FeatureRows) -> None:
        super().take_features(session, first_position, rows)
        self.taken.setdefault(session, {}).update(enumerate(rows, start=first_position))


@asynccontextmanager
async def _services(
    folder: Path, target_folder: Path, *, static: bool
) -> AsyncIterator[tuple[AsyncClient, NotingDrafter]]:
    tokenizer = load_tokenizer(TOKENIZER)
    target = eagle_files.write_target(target_folder)
    kind = kind_of(folder)
    assert kind is not None
    drafter = NotingDrafter(kind.load(folder, target, SETTINGS))
    drafter.measure()  # as the catalogue does: its first step is not a request's
    drafter.taken.clear()
    model = tiny.random_model(eagle_files.target_config(), seed=7)
    async with (
        target_service(build_engine(model, tokenizer, SETTINGS, "tiny", static=static)) as (_, target_address),
        draft_service(drafter._engine, drafter=drafter) as (_, draft_address),
        coordinator(target_address, draft_address, model=TOKENIZER) as client,
    ):
        yield client, drafter


def _request(speculation: SpeculationSettings, temperature: float) -> GenerateRequest:
    return GenerateRequest(
        token_ids=PROMPT,
        seed=5,
        max_new_tokens=LENGTH,
        ignore_eos=True,
        sampling=SamplingParams(temperature=temperature),
        speculation=speculation,
    )


def _expected(text: Sequence[int], inputs: Sequence[int]) -> np.ndarray[Any, Any]:
    """[tokens, layers · hidden], as transformers computes them."""
    model = tiny.random_model(eagle_files.target_config(), seed=7)
    with torch.no_grad():
        states = model(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    return torch.cat([states[each][0] for each in inputs], dim=-1).numpy()


@pytest.mark.parametrize(
    ("third", "temperature", "static"), [(True, 0.8, False), (False, 0.0, False), (True, 0.8, True)]
)
async def test_drafts_read_the_targets_own_states_and_change_no_text(
    third: bool, temperature: float, static: bool, tmp_path: Path
) -> None:
    """`static`: the target's engine is the one that GPUs have."""
    tensors = eagle_files.eagle3_tensors() if third else eagle_files.eagle1_tensors()
    config = {**LLAMA, "draft_vocab_size": len(DRAFT_IDS)} if third else LLAMA
    folder = eagle_files.write_draft(tmp_path / "draft", config, tensors)
    async with _services(folder, tmp_path / "target", static=static) as (client, drafter):
        alone = await client.generate(_request(OFF, temperature))
        for speculation in (CHAIN, TREE):
            one = await client.generate(_request(speculation, temperature))
            assert one.token_ids == alone.token_ids
            assert any(record.proposed for record in one.stats.records)
            taken = drafter.taken[max(drafter.taken)]
            expected = _expected((*PROMPT, *one.token_ids), INPUTS if third else (-1,))
            assert sorted(taken) == [*range(len(taken))]
            assert len(taken) >= len(PROMPT)
            for position, row in taken.items():
                # float16 on the wire.
                np.testing.assert_allclose(row, expected[position], rtol=2e-3, atol=2e-3)
