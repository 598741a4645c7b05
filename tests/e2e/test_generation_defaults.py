"""A model's defaults through all three services: text, description and resuming go by one resolution of a request."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from paceline.client import AsyncClient
from paceline.client.shared import Progress
from paceline.engine.table.engine import load_table
from paceline.models.generation_defaults import GenerationDefaults
from paceline.protocol.generation import GenerateRequest, SpeculationSettings, Started
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import FIELDS_WITH_DEFAULTS, SamplingParams
from tests.e2e.in_process import NEAR, TARGET, coordinator
from tests.services.feature_spy import FeatureSpy
from tests.services.harness import draft_service, target_service

FILE = SamplingParams(temperature=0.5, top_k=12, top_p=0.75, min_p=0.0625, repetition_penalty=1.25)
"""Numbers that float32 holds."""
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
PROMPT = tuple(range(1, 9))
LENGTH = 24
NOBODY = "127.0.0.1:1"


def request(sampling: SamplingParams, acceptance: Acceptance = Acceptance.COUPLED, **changes: Any) -> GenerateRequest:
    wanted = {"max_new_tokens": LENGTH, "token_ids": PROMPT, "seed": 3, "ignore_eos": True, **changes}
    coupled = acceptance is Acceptance.COUPLED  # under the other rules a seed's text depends on what was drafted
    drafted = SpeculationSettings(drafter="model", num_draft_tokens=3) if coupled else SpeculationSettings(off=True)
    return GenerateRequest(sampling=sampling, acceptance=acceptance, speculation=drafted, **wanted)


async def text(client: AsyncClient, *wanted: Any, **changes: Any) -> tuple[int, ...]:
    return (await client.generate(request(*wanted, **changes))).token_ids


async def test_a_request_has_what_it_leaves_out_from_the_model_and_the_rest_is_its_own() -> None:
    async with AsyncExitStack() as services:
        engine = load_table(NEAR)
        _, target = await services.enter_async_context(target_service(load_table(TARGET)))
        _, draft = await services.enter_async_context(draft_service(engine, drafter=FeatureSpy(engine)))
        plain = await services.enter_async_context(coordinator(target, draft))
        own = GenerationDefaults(FILE, max_new_tokens=17)
        client = await services.enter_async_context(coordinator(target, draft, defaults=own))
        for acceptance in Acceptance:
            explicit = await text(plain, FILE, acceptance)
            assert await text(client, SamplingParams(), acceptance) == explicit
            assert explicit != await text(plain, SamplingParams(), acceptance)
        for name in FIELDS_WITH_DEFAULTS:
            override: dict[str, Any] = {name: PLAIN[name]}
            expected = await text(plain, replace(FILE, **override))
            assert await text(client, SamplingParams(**override)) == expected, name
        assert await text(client, SamplingParams(**PLAIN)) == await text(plain, SamplingParams())
        assert len(await text(client, FILE, max_new_tokens=None)) == 17
        assert len(await text(client, FILE, max_new_tokens=20)) == 20
        (model,) = await client.describe_models()
        assert model.defaults == {
            "temperature": 0.5, "top_k": 12, "top_p": 0.75, "min_p": 0.0625, "repetition_penalty": 1.25,
            "max_new_tokens": 17,
        }  # fmt: skip
        assert (await plain.describe_models())[0].defaults == {}


async def test_a_text_that_is_resumed_elsewhere_keeps_the_numbers_that_it_began_with() -> None:
    asked = SamplingParams(top_k=5)
    async with AsyncExitStack() as services:
        _, target = await services.enter_async_context(target_service(load_table(TARGET)))
        own = GenerationDefaults(FILE)
        first = await services.enter_async_context(coordinator(target, NOBODY, awaits_draft=False, defaults=own))
        other = await services.enter_async_context(coordinator(target, NOBODY, awaits_draft=False))
        whole = await text(first, asked)
        progress = Progress(request(asked))
        async for event in first.stream(request(asked)):
            progress.take(event)
            if isinstance(event, Started):
                assert event.sampling == asked.with_defaults(FILE)
            if len(progress.token_ids) >= 10:
                break
        resumed = await other.generate(progress.rest)
        assert progress.token_ids + resumed.token_ids == whole
