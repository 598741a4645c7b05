"""A prompt's log-probabilities through real services: to both clients, and past killed processes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.engine.table.engine import TableModel
from paceline.local.service_process import ServiceName
from paceline.models.table_names import TableSpec
from paceline.protocol.generation import (
    Finished,
    GenerateEvent,
    GenerateRequest,
    PromptLogprobs,
    SpeculationSettings,
    Started,
    Tokens,
)
from paceline.protocol.sampling import SamplingParams
from paceline.protocol.target import RowLogprobs
from tests.e2e.cluster import Cluster, cluster_fixture
from tests.services.reports import by_table

SLOW = "table:vocab=64,seed=1,max_length=1024,step_ms=15"
LAW = TableModel(TableSpec.parse(SLOW))
PROMPT = tuple(random.Random(5).choices(range(64), k=400))
"""25 chunks of 16: 0.4 s and more."""
TOP = 4
EXACT = 1e-6
request = partial(GenerateRequest, token_ids=PROMPT, seed=3, max_new_tokens=4, prompt_logprobs=TOP)
slow = cluster_fixture(SLOW, target_flags={"engine.prefill_chunk": 16})


def check(prompt: Sequence[int], rows: Sequence[RowLogprobs]) -> None:
    assert len(rows) == len(prompt) - 1
    assert by_table(prompt, LAW).differs(prompt, rows) < EXACT


async def events_of(cluster: Cluster, strike: Callable[[], None]) -> list[GenerateEvent]:
    """One stream; `strike` once some of the report has come."""
    events: list[GenerateEvent] = []
    async with cluster.async_client() as client:
        async for event in client.stream(request()):
            events.append(event)
            if len(events) == 7:  # behind the start
                await asyncio.to_thread(strike)
    return events


def check_stream(events: Sequence[GenerateEvent], text: Sequence[int]) -> None:
    """The report lies between the start and the text, every row once and in order."""
    kinds = [type(event) for event in events]
    first, last = kinds.index(Tokens), len(kinds) - 1
    assert kinds[0] is Started
    assert set(kinds[1:first]) == {PromptLogprobs}
    assert set(kinds[first:last]) == {Tokens}
    assert kinds[last] is Finished
    rows: list[RowLogprobs] = []
    for event in events[1:first]:
        assert isinstance(event, PromptLogprobs)
        assert event.first_position == len(rows) + 1
        rows += event.rows
    check(PROMPT, rows)
    assert [token for event in events if isinstance(event, Tokens) for token in event.token_ids] == [*text]


@pytest.fixture(scope="module")
def text(slow: Cluster) -> tuple[int, ...]:
    with slow.client() as client:
        return client.generate(request(prompt_logprobs=None)).token_ids


async def test_both_clients_collect_the_report(slow: Cluster, text: tuple[int, ...]) -> None:
    check_stream(await events_of(slow, lambda: None), text)
    with slow.client() as client:
        cached = client.generate(request())
        plain = client.generate(request(prompt_logprobs=None))
        ngram = client.generate(request(speculation=SpeculationSettings(drafter="ngram"), prompt_logprobs=0))
        samples = client.generate_samples(2, request(token_ids=PROMPT[:40], sampling=SamplingParams(logprobs=1)))
    check(PROMPT, cached.prompt_logprobs)
    assert plain.prompt_logprobs == ()
    assert cached.token_ids == plain.token_ids == ngram.token_ids == text
    assert [row.token_ids for row in ngram.prompt_logprobs] == [(token,) for token in PROMPT[1:]]
    check(PROMPT[:40], samples[0].prompt_logprobs)
    assert samples[1].prompt_logprobs == ()
    assert [len(sample.logprobs) for sample in samples] == [4, 4]
    slow.wait_idle()


@pytest.mark.parametrize("name", ["target", "coordinator"])
async def test_a_service_killed_in_the_prompt_is_made_up_for(
    slow: Cluster, text: tuple[int, ...], name: ServiceName
) -> None:
    check_stream(await events_of(slow, lambda: slow.restart(name)), text)
    slow.await_links()
    slow.wait_idle()


def test_the_command_prints_the_report(slow: Cluster) -> None:
    arguments = ["generate", "--coordinator", slow.address, "--prompt", "ab", "--prompt-logprobs", "2", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "2", "--seed", "1"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    prompt = shown["prompt_token_ids"]
    assert shown["prompt_logprobs"][0] is None, "nothing comes before the first token"
    rows = [
        RowLogprobs(
            (row["token_id"], *(each["token_id"] for each in row["top"])),
            (row["logprob"], *(each["logprob"] for each in row["top"])),
        )
        for row in shown["prompt_logprobs"][1:]
    ]
    assert [len(row.token_ids) for row in rows] == [3] * (len(prompt) - 1)
    check(prompt, rows)
