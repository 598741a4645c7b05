"""A target whose KV rows are scarce: no draft ends a request, and what can't fit is refused at the start."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from paceline.client import Generation
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import FinishReason, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from tests.e2e.cluster import Cluster, cluster_fixture, full
from tests.engine import tiny
from tests.models.saving import save_with_tokenizer

ROWS = 512
TARGET = f"table:distribution=text,max_length={ROWS},max_kv_rows={ROWS},step_ms=8,seed=1"
DRAFT = "table:distribution=middling,max_length=4096,step_ms=1,seed=1"
PROMPT = tuple(range(3, 103)) * 4
LENGTH = 508 - len(PROMPT)
OFF = SpeculationSettings(off=True)
CHAIN = SpeculationSettings(drafter="model", num_draft_tokens=3)
TREE = SpeculationSettings(drafter="model", num_draft_tokens=3, tree_widths=(4, 3, 2))
request = partial(GenerateRequest, token_ids=PROMPT, seed=5, ignore_eos=True)
tight = cluster_fixture(TARGET, DRAFT)
"""A target that holds one session of a whole context, and no row more."""


async def written(cluster: Cluster, requests: list[GenerateRequest]) -> list[Generation]:
    """One after the other: the target has rows for one session."""
    async with cluster.async_client() as client:
        return [await client.generate(each) for each in requests]


@pytest.mark.parametrize("speculation", [full(SpeculationSettings()), CHAIN])
async def test_an_honest_draft_ends_no_request(tight: Cluster, speculation: SpeculationSettings) -> None:
    asked = partial(request, max_new_tokens=LENGTH)
    drafted, plain = await written(tight, [asked(speculation=speculation), asked(speculation=OFF)])
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason is FinishReason.LENGTH
    accepted = sum(record.accepted for record in drafted.stats.records)
    assert accepted > 0 or speculation is not CHAIN, "on a busy machine a draft need not pay"
    tight.wait_idle()


@pytest.mark.parametrize("length", [full(LENGTH), full(LENGTH + 3), LENGTH + 4])
async def test_trees_are_proposed_to_the_last_rows(tight: Cluster, length: int) -> None:
    plain, drafted = await written(tight, [request(max_new_tokens=length, speculation=each) for each in (OFF, TREE)])
    assert drafted.token_ids == plain.token_ids
    assert any(record.proposed for record in drafted.stats.records[-5:])


@pytest.mark.parametrize("acceptance", [full(Acceptance.REJECTION), Acceptance.BLOCK])
async def test_chains_under_other_acceptances_come_to_the_end_too(tight: Cluster, acceptance: Acceptance) -> None:
    rest = ROWS - len(PROMPT)
    (one,) = await written(tight, [request(max_new_tokens=rest, acceptance=acceptance)])
    assert len(one.token_ids) == rest


async def test_a_decoder_announces_what_its_kv_budget_holds(tmp_path: Path) -> None:
    shape = tiny.llama(num_hidden_layers=2, max_position_embeddings=128)
    engine, _ = tiny.engine_and_plain(shape, kv_bytes=24576)
    assert (engine.info.max_length, engine.info.max_kv_rows) == (128, 96)
    save_with_tokenizer(tiny.random_model(shape), tmp_path / "model")
    flags: dict[str, object] = {"engine.kv_bytes": 24576, "engine.threads": 1}
    cluster = Cluster(tmp_path, target_model=str(tmp_path / "model"), drafters=(), target_flags=flags)
    wanted = GenerateRequest(token_ids=(5, 6, 7, 8) * 4, seed=5, max_new_tokens=80, ignore_eos=True)
    with cluster:
        async with cluster.async_client() as client:
            (model,) = await client.describe_models()
            assert model.max_length == 96
            with pytest.raises(InvalidInput, match="max_new_tokens = 81: must be at most 80"):
                await client.generate(replace(wanted, max_new_tokens=81))
            whole = await client.generate(wanted)
    assert len(whole.token_ids) == 80
