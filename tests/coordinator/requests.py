"""Requests on links that only record what is sent: what arrives, and when, is up to the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, TypeVar, cast

from coordinator.drafting.drafting import Drafting
from coordinator.drafting.settings import DraftingSettings
from coordinator.policy.planner import Planner
from coordinator.sessions.target import TargetSession
from coordinator.sessions.target_pool import TargetPeer, TargetPool
from coordinator.sessions.verified_round import TargetNext, VerifiedRound
from coordinator.text.sequence import GenerationTask, Sequence
from paceline.costs.service_costs import DraftCosts, TargetCosts
from paceline.drafting.draft_pool import DraftPeer, DraftPool
from paceline.drafting.round_draft import NOTHING
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.codec import failure_of
from paceline.protocol.draft import DraftedProposal
from paceline.protocol.errors import InvalidInput, PacelineError, PeerUnavailable
from paceline.protocol.features import FeatureNeed
from paceline.protocol.generation import PromptLogprobs, SpeculationSettings, Tokens
from paceline.protocol.handshake import Fingerprint, Welcome
from paceline.protocol.proposal import ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.protocol.target import Round, Verdict
from tests.coordinator.planned import SaidByDraft, SaidByTarget, record

VOCAB = 64
PROMPT = (1, 2, 3)
MODEL = SpeculationSettings(drafter="model")
WELCOME = Welcome("1", Fingerprint(), 256, 8, max_lease=64)
REFUSAL = InvalidInput("rows = 9: must be at most 8")
Needs = tuple[FeatureNeed, ...]
Command = TypeVar("Command")


def task_of(**changes: Any) -> GenerationTask:
    """A request for 57 tokens behind the prompt, with nothing asked for beyond them."""
    task = GenerationTask(
        prompt=PROMPT, resume_token_ids=(), sampling=SamplingParams(), noise=NoiseKey(1), max_length=60, max_rows=124,
        acceptance=Acceptance.COUPLED, stop=(), eos_token_ids=frozenset(), speculation=SpeculationSettings(),
    )  # fmt: skip
    return replace(task, **changes)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class StreamReader:
    """A client that reads its stream as soon as it is to."""

    def __init__(self, *, reads: bool = False) -> None:
        self.messages: list[PromptLogprobs | Tokens] = []
        self.may_read = asyncio.Event()
        if reads:
            self.may_read.set()

    async def write(self, message: PromptLogprobs | Tokens) -> None:
        await self.may_read.wait()
        self.messages.append(message)


class RecordingLink:
    """Stands for a link that is up, to a service with this welcome and these costs."""

    is_up = True
    is_refused = False
    name = "target"
    address = "nowhere"
    silent_s = 0.0
    on_event: Callable[[Any], None]
    on_down: Callable[[PacelineError], None]

    def __init__(self, costs: TargetCosts | DraftCosts | None = None, **welcome: Any) -> None:
        self.costs = costs or TargetCosts()
        self.welcome = replace(WELCOME, **welcome)
        self.sent: list[Any] = []
        self.last_id = 0

    def why_down(self) -> PacelineError:
        return PeerUnavailable("no link to nowhere")

    def next_session_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def send(self, command: Any, urgent: bool = False) -> None:
        self.sent.append(command)

    def take(self) -> list[Any]:
        """What was sent since the last look."""
        sent, self.sent = self.sent, []
        return sent

    def take_kinds(self) -> list[type]:
        return [type(command) for command in self.take()]

    def take_only(self, kind: type[Command]) -> list[Command]:
        return [command for command in self.take() if isinstance(command, kind)]


class NarrowLink(RecordingLink):
    """A link whose frames have no room for one kind of command."""

    def __init__(self, too_large: type) -> None:
        super().__init__()
        self._too_large = too_large

    def send(self, command: Any, urgent: bool = False) -> None:
        if isinstance(command, self._too_large):
            raise InvalidInput.of(f"bytes of {self._too_large.__name__}", 2_000_000, "at most 1048576")
        super().send(command, urgent)


def target_peer(link: object) -> TargetPeer:
    return TargetPeer(cast(Any, link))


def draft_pool(*links: object) -> DraftPool:
    return DraftPool([DraftPeer(cast(Any, link)) for link in links], timeout_s=1.0, vocab_size=VOCAB)


class TargetRequest:
    """A request's session on one of some targets; it commits whatever its verdicts draw."""

    def __init__(
        self, *links: RecordingLink, wait_s: float = 10.0, round_timeout_s: float = 10.0, **task: Any
    ) -> None:
        self.links = links or (RecordingLink(),)
        self.link = self.links[0]
        self.task = task_of(**task)
        self.pool = TargetPool(map(target_peer, self.links), round_timeout_s=round_timeout_s, wait_s=wait_s)
        self.session = TargetSession(self.pool, self.task)
        self.ids = [*self.task.prompt]

    async def round(
        self, lease: int = 0, proposal: Proposal | None = None, *, drafting: bool = False
    ) -> VerifiedRound:
        async def dispatched(round_: Round) -> None:
            await asyncio.sleep(0)

        verified = await self.session.verify(self.ids, ROOT, proposal, lease, "", dispatched, drafting=drafting)
        self.ids += verified.verdict.token_ids
        return verified

    async def pending(self, *arguments: Any, **options: Any) -> asyncio.Task[VerifiedRound]:
        """A round that waits for its verdict."""
        task = asyncio.create_task(self.round(*arguments, **options))
        await turns()
        return task

    def answer(self, base_length: int, token: int = 7, session: int = 1, link: int = 0) -> None:
        """A verdict arrives."""
        self.links[link].on_event(Verdict(session, base_length, (token,)))

    async def verify(self, base_length: int, token: int = 7, **options: Any) -> VerifiedRound:
        """A round, and the verdict that it waits for."""
        task = await self.pending(**options)
        self.answer(base_length, token)
        return await task

    async def lose(self) -> None:
        """The first link breaks; then its coordinator has done what it does."""
        self.link.on_down(PeerUnavailable("gone"))
        await turns()

    async def refuse(
        self, error: PacelineError = REFUSAL, *, session: int = 1, link: int = 0, closed: bool = False
    ) -> None:
        """A target refuses something that a session was sent; then its coordinator has done what it does."""
        self.links[link].on_event(failure_of(session, error, closed))
        await turns()


class DraftedRequest:
    """A request that follows the planner, with the model drafter unless it says otherwise."""

    def __init__(
        self, speculation: SpeculationSettings = MODEL, *, lease: int = 16, needs: Needs = (), **task: Any
    ) -> None:
        self.link = RecordingLink(SaidByDraft().costs, drafters=("model",), drafter_needs=needs)
        checked = task_of(speculation=speculation, **task)
        self.target = cast(TargetPeer, SaidByTarget())
        self.sequence = Sequence(checked, TableTokenizer(VOCAB, None))
        settings = DraftingSettings(fan_out=4, lease=lease)
        self.drafting = Drafting(checked, self.sequence, draft_pool(self.link), Planner(), settings)
        self.drafting.open("")

    @property
    def lease(self) -> int:
        """Rounds behind the planned one that the target may start by itself."""
        return self.drafting._plan.lease

    def commit(self, tokens: Seq[int], leased: int = 0, node: int = ROOT, **ahead: Any) -> Outcome:
        """A verdict is committed that brings tokens behind a node's."""
        outcome = Outcome(len(self.sequence.ids) - 1, node, tokens[-1])
        self.sequence.ids += tokens
        target_next = TargetNext(leased, peer=self.target, **ahead)
        self.drafting.commit(record(), NOTHING, None, outcome, tokens, target_next, "")
        return outcome

    def advance(self, tokens: Seq[int], leased: int = 0) -> None:
        """Tokens are committed, and the next round leaves."""
        self.commit(tokens, leased)
        self.dispatched()

    def drafts(self, outcome: Outcome | None, proposal: Proposal, session: int = 1) -> None:
        """A proposal arrives."""
        self.link.on_event(DraftedProposal(session, outcome, proposal))

    def round(self, proposal: Proposal | None = None) -> Round:
        """The round behind what is committed."""
        return Round(1, len(self.sequence.ids) - 1, ROOT, (self.sequence.ids[-1],), proposal)

    def dispatched(self) -> None:
        self.drafting.verifying(self.round())
