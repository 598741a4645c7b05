"""Grammars that attack the services, with other users beside them: refused by a limit, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from psutil import Process

from paceline.client import AsyncClient
from paceline.local.service_process import Flags
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from tests.e2e.cluster import Cluster, cluster_fixture, eventually, full
from tests.e2e.streams import stream
from tests.grammars.hostile import HOSTILE
from tests.grammars.processes import hosts, workers

TARGET = "table:vocab=260,seed=2,sharpness=1.5"
NEAR = f"{TARGET},noise=0.3"
MEMORY = 1 << 28
LIMITS: Flags = {"grammar.compile_ms": 900, "grammar.memory_bytes": MEMORY}
ORDINARY = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "([a-f][g-k]+)+"))
DRAFTED = SpeculationSettings(drafter="model", num_draft_tokens=3)
services = cluster_fixture(TARGET, NEAR, target_flags=LIMITS, draft_flags=LIMITS)


def request(sampling: SamplingParams, speculation: SpeculationSettings = DRAFTED) -> GenerateRequest:
    return GenerateRequest(prompt="abc", sampling=sampling, seed=4, max_new_tokens=24, speculation=speculation)


@pytest.mark.parametrize("name", ["multiple", *(full(each) for each in HOSTILE if each != "multiple")])
async def test_a_hostile_grammar_costs_its_own_request_alone(services: Cluster, name: str) -> None:
    target = services.processes["target"].pid
    hostile = request(SamplingParams(grammar=HOSTILE[name]))
    async with services.async_client() as client:
        expected = [(await client.generate(request(each))).token_ids for each in (ORDINARY, SamplingParams())]
        known, before = len(workers(target)), services.status("target").resident_bytes
        refused = asyncio.create_task(failure(client, hostile))
        await asyncio.to_thread(eventually, lambda: len(workers(target)) > known, "it is being compiled")
        beside = [(await client.generate(request(each))).token_ids for each in (ORDINARY, SamplingParams())]
        assert not refused.done(), "they were answered meanwhile"
        assert beside == expected
        fresh = SamplingParams(grammar=Grammar(GrammarKind.REGEX, f"[{'abcd'[: 2 + len(name) % 3]}]+"))
        assert (await client.generate(request(fresh))).token_ids
        error = await refused
        assert error.metadata["field"] == HOSTILE[name].kind.value
        assert "grammar.compile_ms" in error.message or "grammar.memory_bytes" in error.message
        assert (await client.generate(request(ORDINARY))).token_ids == expected[0]
    assert services.processes["target"].pid == target
    assert services.status("target").resident_bytes < before + MEMORY // 4
    services.wait_idle()


async def failure(client: AsyncClient, hostile: GenerateRequest) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        await client.generate(hostile)
    return caught.value


async def test_workers_that_are_killed_in_mid_text_change_no_token(services: Cluster) -> None:
    target = services.processes["target"].pid
    matching = request(SamplingParams(grammar=Grammar(GrammarKind.REGEX, "[a-y]+z")))

    def kill(processes: Callable[[int], list[Process]]) -> None:
        for process in processes(target):
            process.kill()

    async with services.async_client() as client:
        expected = (await client.generate(matching)).token_ids
        for processes in (workers, hosts):
            blows = [(tokens, partial(kill, processes)) for tokens in range(4, 8)]
            assert (await stream(client, matching, *blows)).token_ids == expected
    services.wait_idle()


async def test_a_draft_that_cannot_follow_a_grammar_costs_drafting_only(tmp_path: Path) -> None:
    tight: Flags = {"grammar.compile_ms": 10, "grammar.memory_bytes": 1 << 24}
    sampling = SamplingParams(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type":"integer","multipleOf":50021}'))
    with Cluster(tmp_path, TARGET, (f"model:{NEAR}",), draft_flags=tight) as running:
        async with running.async_client() as client:
            drafted = await client.generate(request(sampling))
            alone = await client.generate(request(sampling, SpeculationSettings(off=True)))
            assert drafted.token_ids == alone.token_ids
            plain = await client.generate(request(SamplingParams()))
            assert plain.stats.num_draft_tokens > 0
        running.wait_idle()
