"""One request's drafting beside a link that only records: what the draft service is told, and when."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, cast

import pytest

from coordinator.draft_session import DraftPeer
from coordinator.drafting import Drafting, DraftingSettings
from coordinator.knowledge import Knowledge
from coordinator.sequence import Job, Sequence
from coordinator.throttle import Level, Throttle
from paceline.rpc.link import DraftLink
from paceline.tokenizer import TableTokenizer
from paceline.types import (
    ROOT,
    Acceptance,
    Close,
    Commit,
    DraftOpen,
    NoiseKey,
    Outcome,
    Round,
    SamplingParams,
    SpeculationSettings,
    Verifying,
)

VOCAB = 64
PROMPT = (1, 2, 3)


class RecordingLink:
    """Stands for a link that is up."""

    is_up = True
    name = "draft"

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self._last_id = 0

    def next_session_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def send(self, command: Any, urgent: bool = False) -> None:
        self.sent.append(command)

    def take(self) -> list[type]:
        """Kinds of what was sent since the last look."""
        sent, self.sent = self.sent, []
        return [type(command) for command in sent]


class FixedThrottle(Throttle):
    """Leaves what the test says."""

    fixed = Level.FULL

    @property
    def level(self) -> Level:
        return self.fixed


class Request:
    """A request that follows the policy, with the model drafter."""

    def __init__(self) -> None:
        job = Job(
            prompt=PROMPT,
            resumed=(),
            sampling=SamplingParams(),
            noise=NoiseKey(1),
            acceptance=Acceptance.COUPLED,
            max_length=60,
            stop=(),
            eos_token_ids=frozenset(),
            speculation=SpeculationSettings(drafter="model"),
        )
        self.link, self.throttle = RecordingLink(), FixedThrottle()
        knowledge = Knowledge()
        knowledge.throttle = self.throttle
        peer = DraftPeer(cast(DraftLink, self.link), timeout_s=1.0, vocab_size=VOCAB)
        self.drafting = Drafting(job, peer, knowledge, DraftingSettings(fan_out=4))
        self.sequence = Sequence(job, TableTokenizer(VOCAB, None))
        self.drafting.open(self.sequence, "")

    def commit(self, tokens: Seq[int]) -> None:
        base = len(self.sequence.ids) - 1
        self.sequence.ids += tokens
        self.drafting.commit(Outcome(base, ROOT, tokens[-1]), tokens, self.sequence, 0, "")

    def dispatched(self) -> None:
        self.drafting.verifying(Round(1, len(self.sequence.ids) - 1, ROOT, (self.sequence.ids[-1],)))


@pytest.fixture
def request_() -> Request:
    return Request()


def test_the_draft_hears_of_a_commit_behind_the_round_not_before(request_: Request) -> None:
    assert request_.link.take() == [DraftOpen]
    request_.commit((5,))
    assert request_.link.take() == []
    request_.dispatched()
    assert request_.link.take()[0] is Commit
    request_.dispatched()
    assert Commit not in request_.link.take(), "told once"


def test_under_a_load_that_leaves_nothing_the_draft_hears_nothing(request_: Request) -> None:
    request_.link.take()
    request_.throttle.fixed = Level.NONE
    request_.commit((5,))
    assert request_.link.take() == [Close]
    request_.commit((6,))
    request_.dispatched()
    assert request_.link.take() == []


def test_what_was_missed_meanwhile_is_brought_along_when_it_may_draft_again(request_: Request) -> None:
    request_.throttle.fixed = Level.NONE
    request_.commit((5,))
    request_.commit((6, 7))
    request_.link.take()
    request_.throttle.fixed = Level.FULL
    request_.commit((8,))
    request_.dispatched()
    opened = [command for command in request_.link.sent if isinstance(command, DraftOpen)]
    assert [command.token_ids for command in opened] == [(*PROMPT, 5, 6, 7, 8)]
    assert all(isinstance(command, DraftOpen | Verifying) for command in request_.link.sent)
