"""A draft service of several drafters: `auto` finds out which serves the text, and the text stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from tests.e2e.cluster import Cluster

TARGET = "table:vocab=64,seed=1,step_ms=10"
GOOD = "model:table:vocab=64,seed=1,noise=0.3,step_ms=1"
USELESS = "model:table:vocab=64,seed=1,invert=1,step_ms=1"


request = partial(GenerateRequest, token_ids=(3, 1, 4, 1, 5), seed=7, max_new_tokens=120, ignore_eos=True)
REQUESTS = 6
"""Within which the choice is made: one tries the useless drafter, one the good one; a busy machine may cost some."""


@pytest.mark.parametrize("drafters", [(USELESS, GOOD), (GOOD, USELESS)], ids=["good-last", "good-first"])
async def test_auto_drafts_with_the_good_one(tmp_path: Path, drafters: Sequence[str]) -> None:
    good = "model" if drafters[0] == GOOD else GOOD
    used: list[set[str]] = []
    with Cluster(tmp_path, target_model=TARGET, drafters=tuple(drafters)) as cluster:
        async with cluster.async_client() as client:
            plain = await client.generate(request(speculation=SpeculationSettings(off=True)))
            while len(used) < REQUESTS and used[-1:] != [{good}]:
                drafted = await client.generate(request(speculation=SpeculationSettings(drafter="auto")))
                assert drafted.token_ids == plain.token_ids
                proposed = [record for record in drafted.stats.records if record.proposed]
                used.append({record.drafter for record in proposed if record.drafter != "ngram"})
    assert used[-1] == {good}, used
