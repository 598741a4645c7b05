"""Faults on real processes under load: nothing is lost, changed or held; defects that are planted are told."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.protocol.target import TargetOpened
from paceline.v1 import target_service_pb2 as target_pb
from tests.chaos import runner as runner_module
from tests.chaos.blows import Moment
from tests.chaos.cluster import ChaosCluster
from tests.chaos.doomed import DoomedClient
from tests.chaos.faults import Fault, Kind
from tests.chaos.requests import VOCABULARY
from tests.chaos.runner import Outcome, Runner, chosen
from tests.chaos.shapes import SHAPES, SMALL
from tests.chaos.states import State
from tests.services.harness import linked, target_link, target_open

SMOKE = (
    (Kind.KILL, "target", State.RUN, Moment.DURING),
    (Kind.CUT, "target", State.VERDICT, Moment.BEFORE),
    (Kind.TRUNCATE, "draft", State.PROPOSAL, Moment.DURING),
    (Kind.DUPLICATE, "target", State.SEND, Moment.BEFORE),
    (Kind.CORRUPT, "draft", State.COMMIT, Moment.BEFORE),
    (Kind.LYING_DRAFT, "draft", State.DRAFTING, Moment.BEFORE),
    (Kind.FREEZE, "coordinator", State.TEXT, Moment.DURING),
    (Kind.LEAVE, "client", State.TEXT, Moment.AFTER),
)
FURTHER = (
    (Kind.HOLD, "target", State.FEATURES, Moment.AFTER),
    (Kind.CUT, "coordinator", State.STOP, Moment.AFTER),
    (Kind.FREEZE, "draft", State.PROPOSAL, Moment.BEFORE),
    (Kind.WITHHELD, "target", State.VERDICT, Moment.BEFORE),
    (Kind.KILL_CLIENT, "client", State.TEXT, Moment.AFTER),
)
LINKS = {"client": "coordinator"}


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    with ChaosCluster(tmp_path_factory.mktemp("chaos"), SHAPES[SMALL]) as running:
        yield running


def faults_of(*cells: tuple[Kind, str, State, Moment]) -> list[Fault]:
    return [
        Fault(seed, kind, peer, LINKS.get(peer, peer), state, moment, seed % 2, 0.05, seed, SMALL)
        for seed, (kind, peer, state, moment) in enumerate(cells)
    ]


def with_other_tokens(message: bytes, source: random.Random) -> bytes:
    """What a target must be trusted not to say."""
    response = target_pb.VerifyResponse.FromString(message)
    for event in response.events:
        event.verdict.token_ids[:] = [(token + 1) % VOCABULARY for token in event.verdict.token_ids]
    return response.SerializeToString()


def wrong(outcomes: list[Outcome]) -> list[Outcome]:
    return [each for each in outcomes if each.judged.lost or each.judged.changed or each.judged.leaked]


@pytest.mark.parametrize("cells", [SMOKE, pytest.param(FURTHER, marks=pytest.mark.full)], ids=["eight", "further"])
async def test_faults_lose_change_and_leak_nothing(hurt: ChaosCluster, cells: Any) -> None:
    runner, faults = Runner(hurt), faults_of(*cells)
    await runner.prepare(sorted({each for fault in faults for each in chosen(fault)}, key=str))
    outcomes = [await runner.run(fault) for fault in faults]
    assert wrong(outcomes) == []
    assert [each.fault.kind for each in outcomes if not each.struck] == []
    assert cells is FURTHER or outcomes[0].notice_s is not None, "a dead target is noticed"


async def test_a_target_that_writes_other_tokens_is_told_by_the_oracle(
    hurt: ChaosCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, fault = Runner(hurt), faults_of((Kind.LYING_COSTS, "target", State.RUN, Moment.BEFORE))[0]
    await runner.prepare(chosen(fault))
    monkeypatch.setattr(runner_module, "COST_LIES", {"target": with_other_tokens})
    monkeypatch.setattr(runner_module, "WAIT_S", 2.0)  # of what it says some fits no round: such a text never ends
    outcome = await runner.run(fault)
    assert outcome.judged.changed or outcome.judged.lost, "by what else it says, where no round fits that"


async def test_a_client_that_does_not_resume_is_told_by_the_oracle(
    hurt: ChaosCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "RESUME_WAIT_S", 0.0)
    outcome = await Runner(hurt).run(faults_of((Kind.CUT, "coordinator", State.TEXT, Moment.BEFORE))[0])
    assert any("PEER_UNAVAILABLE" in told for told in outcome.judged.lost)


async def test_a_session_that_somebody_keeps_is_a_leak(hurt: ChaosCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, fault = Runner(hurt), faults_of((Kind.DELAY, "draft", State.COMMIT, Moment.AFTER))[0]
    assert wrong([await runner.run(fault)]) == []
    monkeypatch.setattr(hurt, "settle_s", 0.5)
    async with linked(target_link(hurt.address_of("target"))) as events:
        events.link.send(target_open(1, (1, 2, 3)))
        await events.of(TargetOpened, 1)
        outcome = await runner.run(fault)
    assert any("target holds nothing" in told for told in outcome.judged.leaked)


@pytest.mark.full
async def test_what_a_client_leaves_behind_that_only_seems_killed_is_a_leak(
    hurt: ChaosCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DoomedClient, "kill", lambda doomed: doomed._process.send_signal(signal.SIGSTOP))
    monkeypatch.setattr(hurt, "settle_s", 0.5)
    outcome = await Runner(hurt).run(faults_of((Kind.KILL_CLIENT, "client", State.TEXT, Moment.AFTER))[0])
    assert any("holds nothing" in told or "has no" in told for told in outcome.judged.leaked)
    assert outcome.judged.changed == outcome.judged.lost == ()
