"""What a coordinator says on a link, right from the first frame to the last, and mutations of all of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from paceline.protocol.codec import encode_hello, error_of
from paceline.protocol.draft import Commit, DraftBudget, DraftedProposal, Verifying
from paceline.protocol.features import Features, FeatureType
from paceline.protocol.handshake import Hello
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.sampling import Grammar, GrammarKind, SamplingParams
from paceline.protocol.session import Close, Failure
from paceline.protocol.target import Prefetch, Round, Verdict
from paceline.rpc.link_kinds import DRAFT, TARGET, LinkKind
from tests.fuzz.cases import typed
from tests.fuzz.message_mutations import mutated_message, parts_of_messages, stored_messages
from tests.fuzz.odd_values import mutated_bytes
from tests.services.expected import own_tokens
from tests.services.harness import chain, draft_open, first_round, target_open

PREFIX = (1, 2, 3, 4, 5)
TEXT = 12
"""Tokens that a script commits, at most."""
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_k=4, top_p=0.8, logprobs=2),
    SamplingParams(repetition_penalty=1.3, logit_bias=((3, 2.0),), bad_words=((4, 5),), min_tokens=3),
    SamplingParams(grammar=Grammar(GrammarKind.REGEX, "[a-f]+")),
)


@dataclass(frozen=True)
class FuzzedLink:
    """The links of one service: the commands of a session by its number, an ordinary session's and one that means
    nothing, the kind of event that answers them, and the name of its commands among the stored messages."""

    kind: LinkKind[Any, Any]
    session: Callable[[random.Random, int], list[Any]]
    probe_commands: tuple[Any, ...]
    answer: type[Verdict | DraftedProposal]
    stored: str

    def mutated_script(self, rng: random.Random) -> tuple[bytes, ...]:
        """The frames of a link with two sessions, with mutations."""
        return _script(rng, self.kind, [*self.session(rng, 1), *self.session(rng, 2)], self.stored)

    @property
    def probe_frames(self) -> list[bytes]:
        commands = [self.kind.commands.encode(command) for command in self.probe_commands]
        frames = [self.kind.request(hello=encode_hello(Hello("probe"))), self.kind.request(commands=commands)]
        return [frame.SerializeToString() for frame in frames]

    def is_answered(self, events: Sequence[Any]) -> bool:
        return any(isinstance(event, self.answer) for event in events)

    def check_answer(self, events: Sequence[Any]) -> None:
        answers = [event for event in events if isinstance(event, self.answer)]
        assert answers, "it is answered"
        answer = answers[0]
        tokens = list(answer.token_ids if isinstance(answer, Verdict) else answer.proposal.token_ids)
        assert tokens == own_tokens(PREFIX, len(tokens)), "the text is the target's own"


def failure_reasons(events: Sequence[Any]) -> list[str]:
    """Under which names the failures among events are counted."""
    return [typed(error_of(event)) for event in events if isinstance(event, Failure)]


def _target_session(rng: random.Random, number: int) -> list[Any]:
    prefix = tuple(rng.randrange(1, 32) for _ in range(rng.randint(1, 40)))
    mode = rng.choice((Acceptance.COUPLED, Acceptance.COUPLED, Acceptance.REJECTION, Acceptance.BLOCK))
    opened = target_open(
        number,
        prefix,
        sampling=rng.choice(SAMPLINGS),
        acceptance=mode,
        max_length=rng.choice((0, len(prefix) + TEXT)),
    )
    own = own_tokens(prefix, TEXT)
    proposal = chain([own[0], own[1], 31]) if mode is Acceptance.COUPLED else None
    prefetched = Proposal(0, (own[3],), (1.0,))
    after = len(prefix) + 1
    return [
        opened,
        first_round(number, prefix, proposal),
        Prefetch(number, len(prefix) - 1, ((Outcome(len(prefix) - 1, 1, own[2]), prefetched),)),
        Round(number, after, 1, (own[2],), None, lease=rng.choice((0, 3, 64))),
        Round(number, len(prefix) - 1, ROOT, (prefix[-1],), proposal),
        Close(number),
    ]


def _draft_session(rng: random.Random, number: int) -> list[Any]:
    prefix = tuple(rng.randrange(1, 32) for _ in range(rng.randint(1, 40)))
    mode = rng.choice((Acceptance.COUPLED, Acceptance.COUPLED, Acceptance.REJECTION, Acceptance.BLOCK))
    budget = rng.choice(
        (DraftBudget(3, fan_out=2), DraftBudget(2, (3, 2)), DraftBudget(3, max_nodes=8, shadow=True), DraftBudget())
    )
    own = own_tokens(prefix, TEXT)
    length = len(prefix)
    features = Features(number, length, FeatureType.FLOAT16, (1, 1, 4), b"\0" * 8)
    return [
        draft_open(number, prefix, budget, sampling=rng.choice(SAMPLINGS), acceptance=mode),
        Verifying(number, length - 1, proposal=chain(own[:2], 9), budget=budget),
        Commit(number, Outcome(length - 1, 1, own[2]), tuple(own[:3]), length, budget),
        Verifying(number, length + 2, budget=budget),
        features,
        Commit(number, Outcome(length + 2, ROOT, own[3]), (own[3],), length + 3, budget),
        Close(number),
    ]


TARGET_LINK = FuzzedLink(
    TARGET,
    _target_session,
    (target_open(1, PREFIX), first_round(1, PREFIX), Close(2)),
    Verdict,
    "target_command",
)
DRAFT_LINK = FuzzedLink(
    DRAFT,
    _draft_session,
    (draft_open(1, PREFIX, DraftBudget(max_tokens=3)), Close(2)),
    DraftedProposal,
    "draft_command",
)


def _script(rng: random.Random, kind: LinkKind[Any, Any], commands: Sequence[Any], stored: str) -> tuple[bytes, ...]:
    messages: list[Message] = [kind.commands.encode(command) for command in commands]
    for _ in range(rng.randint(1, 4)):
        rng.choice((_mutate_one, _mutate_one, _drop, _repeat, _swap, _splice))(rng, messages, stored)
    frames = [kind.request(hello=encode_hello(Hello("fuzz")))]
    while messages:
        count = rng.choice((1, 1, 1, 2, len(messages)))
        frames.append(kind.request(commands=messages[:count]))
        del messages[:count]
    return tuple(_wires(rng, frames))


def _wires(rng: random.Random, frames: list[Message]) -> list[bytes]:
    """The frames' bytes; one in four scripts has a frame that is mutated itself, or out of place."""
    choice = rng.randrange(12)
    if choice == 0:
        place = rng.randrange(len(frames))
        frames[place] = mutated_message(rng, frames[place], parts_of_messages())
    elif choice == 1:
        frames.insert(rng.randrange(len(frames)), frames[rng.randrange(len(frames))])
    wires = [frame.SerializeToString() for frame in frames]
    if choice == 2:
        place = rng.randrange(len(wires))
        wires[place] = mutated_bytes(rng, wires[place], rng.choice(wires))
    return wires


def _mutate_one(rng: random.Random, messages: list[Message], stored: str) -> None:
    if messages:
        place = rng.randrange(len(messages))
        messages[place] = mutated_message(rng, messages[place], parts_of_messages(), most=1)


def _drop(rng: random.Random, messages: list[Message], stored: str) -> None:
    if messages:
        del messages[rng.randrange(len(messages))]


def _repeat(rng: random.Random, messages: list[Message], stored: str) -> None:
    if messages:
        place = rng.randrange(len(messages))
        messages[place:place] = [messages[place]] * rng.choice((1, 1, 3, 1100))


def _swap(rng: random.Random, messages: list[Message], stored: str) -> None:
    if messages:
        first, second = rng.randrange(len(messages)), rng.randrange(len(messages))
        messages[first], messages[second] = messages[second], messages[first]


def _splice(rng: random.Random, messages: list[Message], stored: str) -> None:
    """A stored message that means another session, or one of these."""
    message: Any = type(stored_messages(stored)[0])()
    message.CopyFrom(rng.choice(stored_messages(stored)))
    kind = message.WhichOneof(message.DESCRIPTOR.oneofs[0].name)
    if rng.random() < 0.8:
        getattr(message, kind).session_id = rng.choice((1, 2))
    messages.insert(rng.randrange(len(messages) + 1), message)
