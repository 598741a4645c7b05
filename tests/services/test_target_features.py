"""Hidden states that a target sends, over real gRPC: of exactly the committed tokens, whatever was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import target_service.features as sent_by_target
from paceline.engine.features import FeatureRows, decode_features
from paceline.engine.table.engine import TABLE_FEATURES
from paceline.protocol.features import FeatureNeed, FeatureRequest, Features, FeatureType
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.target import Prefetch, Round, TargetOpened, Verdict
from paceline.sampling import acceptance as rules
from paceline.sampling.distribution import processed_scores, sparse_support
from target_service.step import PrefillWork, RoundWork
from tests.services.expected import own_tokens
from tests.services.feature_spy import NEED, misplaced, positions
from tests.services.harness import LAW, NOISE, SAMPLING, Events, RecordingEngine, chain, target_open, verdict_of

PREFIX = tuple(range(1, 22))
"""Two chunks of a prompt, and a root."""
Propose = Callable[[Sequence[int]], Proposal | None]


def target_only(text: Sequence[int]) -> Proposal | None:
    return None


def half_right(text: Sequence[int]) -> Proposal:
    """A chain whose first two tokens are the target's own."""
    own = own_tokens(text, 4)
    return chain((own[0], own[1], (own[2] + 1) % 32, own[3]))


def fork(own: Sequence[int]) -> Proposal:
    """A tree whose right path is not its first nodes: accepted rows do not stand in place."""
    return Proposal(1, ((own[0] + 1) % 32, own[0], 3, own[1], 5), (1.0,) * 5, (ROOT, ROOT, 0, 1, 1))


def branching(text: Sequence[int]) -> Proposal:
    return fork(own_tokens(text, 2))


def from_supports(text: Sequence[int]) -> Proposal:
    """A chain of the law's favourites, and behind them one that is all but certain of a token picked blindly."""
    tokens, supports = [*text], []
    for _ in range(2):
        scores = processed_scores(LAW.logits(tokens)[np.newaxis], SAMPLING)[0]
        supports.append(sparse_support(scores))
        tokens.append(supports[-1].token_ids[int(np.argmax(supports[-1].probabilities))])
    tokens.append(7)
    supports.append(type(supports[0])((7,), (1.0,)))
    drafted = tuple(tokens[len(text) :])
    q = tuple(s.probabilities[s.token_ids.index(token)] for s, token in zip(supports, drafted, strict=True))
    return Proposal(1, drafted, q, supports=tuple(supports))


@dataclass
class Caller:
    """A coordinator of one session: sends rounds, commits what they draw, and keeps the features that come."""

    events: Events
    acceptance: Acceptance = Acceptance.COUPLED
    text: list[int] = field(default_factory=lambda: [*PREFIX])
    node: int = ROOT
    session: int = 1
    accepted: list[int] = field(default_factory=list)
    taken: list[tuple[int, FeatureRows]] = field(default_factory=list)

    def open(self, **changes: Any) -> None:
        facts = {"acceptance": self.acceptance, "features": FeatureRequest(NEED)} | changes
        self.events.send(target_open(self.session, self.text, **facts))

    def round(self, proposal: Proposal | None, lease: int = 0) -> Round:
        return Round(self.session, len(self.text) - 1, self.node, (self.text[-1],), proposal, lease=lease)

    def commit(self, round_: Round, verdict: Verdict) -> None:
        decision = rules.decide(self.acceptance, round_, verdict, NOISE)
        self.node = decision.node
        self.accepted.append(len(decision.accepted))
        self.text += decision.committed

    async def write(self, propose: Propose, rounds: int = 6, **changes: Any) -> None:
        """Open, send rounds, and take their features."""
        self.open(**changes)
        await self.run(propose, rounds)
        await self.take_features()

    async def run(self, propose: Propose, rounds: int = 6) -> None:
        for _ in range(rounds):
            round_ = self.round(propose(self.text))
            self.commit(round_, await verdict_of(self.events, round_))

    async def take_features(self, start: int = 0) -> None:
        """Until the last committed token that has a row: the newest one has none yet."""
        while not self.taken or self.taken[-1][0] + len(self.taken[-1][1]) < len(self.text) - 1:
            came = await self.events.of(Features, self.session)
            self.taken.append((came.first_position, decode_features(came)))
        assert positions(self.taken) == [*range(start, len(self.text) - 1)], "each once, in order, none of others"


@pytest.mark.parametrize(
    ("acceptance", "propose", "depths"),
    [
        (Acceptance.COUPLED, target_only, {0}),
        (Acceptance.COUPLED, half_right, {2}),
        (Acceptance.COUPLED, branching, {2}),
        (Acceptance.REJECTION, from_supports, {0, 1, 2, 3}),
        (Acceptance.BLOCK, from_supports, {0, 1, 2, 3}),
    ],
)
async def test_rows_are_of_exactly_the_committed_tokens(
    acceptance: Acceptance, propose: Propose, depths: set[int], target: Events
) -> None:
    caller = Caller(target, acceptance)
    await caller.write(propose, rounds=12)
    assert misplaced(caller.taken, caller.text) == []
    assert set(caller.accepted) <= depths, "what the proposals were made for"
    assert len(set(caller.accepted)) >= min(2, len(depths))


def shifted(work: RoundWork | PrefillWork, verdict: Verdict | None) -> list[int]:
    return [max(0, row - 1) for row in sent_by_target_rows(work, verdict)]


def as_proposed(work: RoundWork | PrefillWork, verdict: Verdict | None) -> list[int]:
    """The first nodes of a proposal in the place of the accepted path."""
    return [*range(len(sent_by_target_rows(work, verdict)))]


def unverified(work: RoundWork | PrefillWork, verdict: Verdict | None) -> list[int]:
    return [*range(len(work.item.token_ids))]


sent_by_target_rows = sent_by_target.committed_rows


@pytest.mark.parametrize(
    ("mutant", "propose"),
    [(shifted, target_only), (shifted, half_right), (as_proposed, branching), (unverified, half_right)],
)
async def test_mutants_that_send_other_rows_are_noticed(
    mutant: Callable[..., list[int]], propose: Propose, monkeypatch: pytest.MonkeyPatch, target: Events
) -> None:
    monkeypatch.setattr(sent_by_target, "committed_rows", mutant)
    caller = Caller(target)
    caller.open()
    await caller.run(propose, rounds=3)
    with pytest.raises(AssertionError):
        await caller.take_features()
        assert misplaced(caller.taken, caller.text) == []


async def test_a_self_started_round_sends_its_accepted_rows(engine: RecordingEngine, target: Events) -> None:
    caller = Caller(target)
    caller.open()
    await target.of(TargetOpened, 1)
    first, (drawn,) = caller.round(None), own_tokens(caller.text, 1)
    prefetched = half_right([*caller.text, drawn])
    await engine.hold(target, first)
    outcome = Outcome(first.base_length, ROOT, drawn)
    await target.handled(Prefetch(1, first.base_length, ((outcome, prefetched),)))
    engine.go.set()
    verdict = await target.of(Verdict, 1)
    assert verdict.self_started is not None
    caller.commit(first, verdict)
    caller.commit(caller.round(prefetched), await target.of(Verdict, 1))
    await caller.take_features()
    assert (misplaced(caller.taken, caller.text), caller.accepted) == ([], [0, 2])


async def test_a_cached_prefix_is_computed_again_as_far_as_its_features_are_not_known(target: Events) -> None:
    for session, known, reused in ((1, 0, 0), (2, 0, 0), (3, 18, 18), (4, 21, 20)):
        caller = Caller(target, session=session)
        caller.open(features=FeatureRequest(NEED, first_position=known))
        opened = await target.of(TargetOpened, session)
        await caller.run(half_right, rounds=2)
        await caller.take_features(start=min(known, len(caller.text)))
        assert (opened.reused_tokens, misplaced(caller.taken, caller.text)) == (reused, [])
    assert (await target.answer(target_open(5, PREFIX), TargetOpened)).reused_tokens == 20, "others share its rows"


async def test_int8_says_nearly_the_same_in_fewer_bytes(target: Events) -> None:
    caller = Caller(target)
    await caller.write(half_right, features=FeatureRequest(NEED, FeatureType.INT8))
    half_a_step = 8 / 127 / 2
    assert misplaced(caller.taken, caller.text, within=1.01 * half_a_step) == []
    assert misplaced(caller.taken, caller.text, within=half_a_step / 100) != []


async def test_a_failed_capture_costs_its_rows_alone(monkeypatch: pytest.MonkeyPatch, target: Events) -> None:
    def broken(work: RoundWork | PrefillWork, verdict: Verdict | None) -> list[int]:
        raise RuntimeError("no rows")

    monkeypatch.setattr(sent_by_target, "committed_rows", broken)
    caller = Caller(target)
    caller.open()
    await caller.run(half_right)
    assert caller.text[len(PREFIX) :] == own_tokens(PREFIX, len(caller.text) - len(PREFIX))
    assert not target.has(Features)


async def test_a_need_that_the_target_cannot_meet_is_refused_by_name(target: Events) -> None:
    assert target.link.welcome is not None
    assert target.link.welcome.features == TABLE_FEATURES
    opening = target_open(1, PREFIX, features=FeatureRequest(FeatureNeed((TABLE_FEATURES.layers,))))
    await target.expect_failure(opening, "UNSUPPORTED", "feature layer = 4: must be below 4", closed=True)
    await Caller(target, session=2).write(half_right, rounds=1)
