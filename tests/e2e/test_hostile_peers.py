"""Peers that say what no peer may say: the link, the message or the request is refused by name, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from paceline.client import Generation
from paceline.protocol.errors import ProtocolMismatch
from paceline.protocol.generation import GenerateRequest, PeerDescription, SpeculationSettings
from paceline.protocol.sampling import SamplingParams
from tests.e2e.lying_relay import HostileCluster, Lie, hostile_cluster, in_events

PROMPT = tuple(range(1, 9))
VOCABULARY = 64
CHAIN = SpeculationSettings(drafter="model", num_draft_tokens=3)
OFF = SpeculationSettings(off=True)
REQUEST_S = 20.0
"""Longest that a request may take here; those beside 60,000 names took 29 s and more."""


def asked(speculation: SpeculationSettings = CHAIN, logprobs: int | None = None, **changes: Any) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.8, logprobs=logprobs)
    wanted = {"token_ids": PROMPT, "seed": 5, "max_new_tokens": 12, "ignore_eos": True, **changes}
    return GenerateRequest(sampling=sampling, speculation=speculation, **wanted)


async def generated(cluster: HostileCluster, request: GenerateRequest) -> Generation:
    async with asyncio.timeout(REQUEST_S):
        return await cluster.client.generate(request)


def many_drafters(frame: Any) -> None:
    if frame.HasField("welcome"):
        frame.welcome.drafters.extend(f"drafter-{number}" for number in range(60_000))


def a_long_drafter(frame: Any) -> None:
    if frame.HasField("welcome"):
        frame.welcome.drafters[0] = "x" * 500_000


def a_welcome_beyond_a_frame(frame: Any) -> None:
    if frame.HasField("welcome"):
        frame.welcome.fingerprint.model = "x" * (2 << 20)


WELCOME_LIES: dict[Lie, str] = {
    many_drafters: "welcome drafters = 60001: must be at most 16",
    a_long_drafter: "bytes of one of welcome drafters = 500000: must be at most 512",
    a_welcome_beyond_a_frame: "frame bytes = ",
}


async def draft_is(cluster: HostileCluster, condition: Callable[[PeerDescription], bool]) -> None:
    async with asyncio.timeout(REQUEST_S):
        while True:
            (model,) = await cluster.client.describe_models()
            if condition(model.peers[-1]):
                return
            await asyncio.sleep(0.01)


async def test_a_welcome_of_too_much_is_refused_by_name_and_costs_no_request_anything() -> None:
    async with hostile_cluster(many_drafters) as cluster:
        plain = await generated(cluster, asked(OFF))
        for lie, words in WELCOME_LIES.items():
            cluster.draft.lie = lie
            await draft_is(cluster, lambda draft, words=words: not draft.up and words in draft.problem)  # type: ignore[misc]
            drafted = await generated(cluster, asked())
            assert drafted.token_ids == plain.token_ids
        cluster.draft.lie = None
        await draft_is(cluster, lambda draft: draft.up)
        again = await generated(cluster, asked())
        assert again.token_ids == plain.token_ids
        assert again.stats.num_spec_steps > 0, "an honest welcome is taken"


FEATURE_LIES: dict[str, Callable[[Any], None]] = {
    "a shape of two": lambda features: features.shape.pop(),
    "a thousand dimensions": lambda features: features.shape.extend([1] * 1000),
    "no rows": lambda features: features.shape.__setitem__(0, 0),
    "other bytes": lambda features: setattr(features, "data", features.data + b"x"),
    "more bytes than may be": lambda features: setattr(features, "data", bytes(300_000)),
    "another type": lambda features: setattr(features, "dtype", "float64"),
    "scales that are none": lambda features: features.scales.append(math.nan),
    "no session": lambda features: setattr(features, "session_id", 0),
}


async def test_malformed_features_alone_are_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async with hostile_cluster(draft_timeout_ms=20) as cluster:
        plain = await generated(cluster, asked(OFF))
        for lie in FEATURE_LIES.values():
            cluster.target.lie = in_events("features", lie)
            with caplog.at_level(logging.WARNING):
                drafted = await generated(cluster, asked())
            assert drafted.token_ids == plain.token_ids
        said = [record.getMessage() for record in caplog.records]
        assert not [line for line in said if "session lost" in line or "malformed event" in line]
        (line,) = (line for line in said if "malformed features" in line)
        assert "peer=target" in line
        assert "session=" in line
        cluster.target.lie = None
        honest = await generated(cluster, asked())
        assert honest.token_ids == plain.token_ids
        assert honest.stats.feature_bytes > 0


def set_all(ids: Any, value: float) -> None:
    ids[:] = [value] * len(ids)


def in_rows(rows: str, change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Changes each row of a repeated field."""

    def changed(said: Any) -> None:
        for row in getattr(said, rows):
            change(row)

    return changed


in_logprobs, in_piece = partial(in_rows, "logprobs"), partial(in_rows, "rows")


def a_row_more(verdict: Any) -> None:
    verdict.token_ids.append(verdict.token_ids[0])
    verdict.logprobs.append(verdict.logprobs[0])


def a_self_started_round(verdict: Any) -> None:
    verdict.self_started.base_length = verdict.base_length + 1
    verdict.self_started.nodes = 3


def undrawn(row: Any) -> None:
    row.token_ids[:], row.logprobs[:] = [VOCABULARY - 1], [-1.0]


def one_more(row: Any) -> None:
    row.token_ids.append(1)
    row.logprobs.append(-1.0)


VERDICT_LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "the first id beyond": (lambda v: set_all(v.token_ids, VOCABULARY), "verdict token_ids = 64: must be below 64"),
    "a token too many": (a_row_more, "verdict token_ids: 2, expected 1"),
    "p where none is": (lambda v: v.target_probabilities.append(0.5), "target_probabilities"),
    "masses where none are": (lambda v: v.residual_masses.append(0.5), "residual_masses"),
    "rows too few": (lambda v: v.logprobs.pop(), "verdict logprobs"),
    "a row's id beyond": (in_logprobs(lambda r: r.token_ids.__setitem__(-1, VOCABULARY)), "verdict logprobs = 64"),
    "a row's ids twice": (in_logprobs(lambda r: set_all(r.token_ids, r.token_ids[0])), "each id once"),
    "a row without what was drawn": (in_logprobs(undrawn), "verdict logprobs"),
    "a round that nothing was left for": (a_self_started_round, "by itself"),
}
PIECE_LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "an id beyond": (in_piece(lambda row: row.token_ids.__setitem__(0, VOCABULARY)), "prompt logprobs = 64"),
    "another token": (in_piece(lambda row: row.token_ids.__setitem__(0, 0)), "of the prompt's token"),
    "more than were asked for": (in_piece(one_more), "prompt logprobs ids = 4: must be at most 3"),
}


@pytest.mark.parametrize(
    ("kind", "lies", "honest_request"),
    [
        ("verdict", VERDICT_LIES, asked(OFF, logprobs=2)),
        ("prompt_piece", PIECE_LIES, asked(OFF, prompt_logprobs=2)),
    ],
    ids=["verdicts", "pieces of prompts"],
)
async def test_what_no_target_can_mean_ends_its_request_by_name(
    kind: str, lies: dict[str, tuple[Callable[[Any], None], str]], honest_request: GenerateRequest
) -> None:
    async with hostile_cluster() as cluster:
        honest = await generated(cluster, honest_request)
        for name, (change, words) in lies.items():
            cluster.target.lie = in_events(kind, change)
            with pytest.raises(ProtocolMismatch) as caught:
                await generated(cluster, honest_request)
            assert words in caught.value.message, name
            cluster.target.lie = None
            again = await generated(cluster, honest_request)
            assert (again.token_ids, again.logprobs) == (honest.token_ids, honest.logprobs), name
