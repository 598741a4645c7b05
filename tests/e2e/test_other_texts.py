"""Drafting from finished texts and from a corpus, through real services: who gets what, and always the same text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from paceline.access.keys import new_key
from paceline.client import AsyncClient, Generation
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from tests.e2e.cluster import Cluster
from tests.e2e.keys import write_keys
from tests.e2e.streams import leave

TARGET = "table:vocab=200,seed=1,contexts=4001,step_ms=1"
"""Its tokens are letters, so that a text in a file is read as the tokens that it was written as."""
LENGTH = 60
OFF = SpeculationSettings(off=True)
COPIES = SpeculationSettings(drafter="ngram", num_draft_tokens=6)
KEYS = {name: new_key() for name in ("ann", "bob", "carol")}
FILED = GenerateRequest(
    token_ids=(7, 8, 9), sampling=SamplingParams(temperature=0), max_new_tokens=LENGTH, ignore_eos=True
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Cluster]:
    """Ann's and Bob's finished texts are kept, Carol's are not; the corpus has one text of the target's."""
    folder = tmp_path_factory.mktemp("texts")
    file = folder / "keys.json"
    write_keys(file, KEYS)
    (corpus / "other.txt").write_text("nothing of the target's")
    flags: dict[str, object] = {"api_keys": str(file), "share_texts": ["ann", "bob"], "corpus": [str(corpus)]}
    cluster = Cluster(folder, TARGET, drafters=(), coordinator_flags=flags)
    cluster.api_key = KEYS["ann"]
    with cluster:
        yield cluster


def asking(cluster: Cluster, name: str) -> AsyncClient:
    return AsyncClient(cluster.address, api_key=KEYS[name], timeout_s=60)


request = partial(
    GenerateRequest, token_ids=(1, 2, 3), seed=5, max_new_tokens=LENGTH, ignore_eos=True, speculation=COPIES
)


def accepted(generation: Generation, drafter: str) -> int:
    """Tokens of proposals of a drafter."""
    return sum(record.accepted for record in generation.stats.records if record.drafter == drafter)


async def test_a_finished_text_drafts_for_its_tenant_and_for_no_other(cluster: Cluster) -> None:
    async with asking(cluster, "ann") as ann, asking(cluster, "bob") as bob, asking(cluster, "carol") as carol:
        plain = await ann.generate(request(speculation=OFF))
        again = await ann.generate(request())
        others = [await bob.generate(request(speculation=OFF)), await carol.generate(request())]
        assert accepted(others[1], "shared") == 0, "Ann's text is not Carol's"
        kept = await carol.generate(request())
        bobs = await bob.generate(request())
    assert {one.token_ids for one in (again, *others, kept, bobs)} == {plain.token_ids}
    assert accepted(again, "shared") > LENGTH / 2
    assert again.stats.rounds < LENGTH / 2
    assert accepted(kept, "shared") == 0, "Carol was not named"
    assert accepted(bobs, "shared") > LENGTH / 2, "Bob has said so himself"


async def test_every_rule_keeps_the_text_of_a_greedy_request(cluster: Cluster) -> None:
    greedy = request(sampling=SamplingParams(temperature=0))
    async with asking(cluster, "ann") as ann:
        plain = await ann.generate(replace(greedy, speculation=OFF))
        for acceptance in Acceptance:
            one = await ann.generate(replace(greedy, acceptance=acceptance))
            assert one.token_ids == plain.token_ids
            assert accepted(one, "shared") > LENGTH / 3
        auto = await ann.generate(replace(greedy, speculation=SpeculationSettings()))
        assert auto.token_ids == plain.token_ids


async def test_what_accept_draws_made_is_not_kept(cluster: Cluster) -> None:
    wanted = request(seed=4321, token_ids=(11, 12, 13), acceptance=Acceptance.BLOCK)
    async with asking(cluster, "bob") as bob:
        await bob.generate(replace(wanted, speculation=OFF))
        assert accepted(await bob.generate(wanted), "shared") <= 4


async def test_a_cancelled_request_keeps_nothing_and_a_resumed_one_its_whole_text(cluster: Cluster) -> None:
    wanted = request(seed=991, token_ids=(9, 9, 4))
    async with asking(cluster, "ann") as ann:
        seen = await leave(ann, replace(wanted, speculation=OFF), LENGTH // 2)
        cluster.wait_idle()
        first = await ann.generate(replace(wanted, max_new_tokens=20))
        assert accepted(first, "shared") <= 4
        resumed = replace(wanted, resume_token_ids=seen, speculation=OFF)
        rest = await ann.generate(resumed)
        whole = await ann.generate(wanted)
    assert (*seen, *rest.token_ids) == whole.token_ids
    assert accepted(whole, "shared") > LENGTH / 2


async def test_the_corpus_drafts_for_everybody(cluster: Cluster, corpus: Path) -> None:
    async with asking(cluster, "carol") as carol:
        plain = await carol.generate(replace(FILED, speculation=OFF))
        before = await carol.generate(replace(FILED, speculation=COPIES))
        assert accepted(before, "corpus") <= 2
        (corpus / "text.txt").write_text(plain.text, "utf-8")
        cluster.restart("coordinator")
        cluster.await_links()
        after = await carol.generate(replace(FILED, speculation=COPIES))
    assert after.token_ids == before.token_ids == plain.token_ids
    assert accepted(after, "corpus") > accepted(before, "corpus") + 5
