"""Running services as a source of passes: they answer prompts, read texts, and state their step times."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from coordinator.sessions.target_pool import TargetPeer
from paceline.costs.cost_line import CostLine
from paceline.drafting.draft_pool import DraftPeer
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import Overloaded, Unsupported, VocabularyMismatch, require
from paceline.protocol.handshake import Fingerprint, Hello, Welcome
from paceline.protocol.proposal import NGRAM
from paceline.protocol.sampling import NoiseKey, SamplingParams
from paceline.rpc.peer_link import DraftLink, PeerLink, TargetLink
from paceline.runtime.config import PeerSettings
from paceline_lab.predict.matching import match_positions
from paceline_lab.predict.passes import SampleText
from paceline_lab.predict.positions import DrafterPositions, TargetPositions
from paceline_lab.predict.reading import TARGET, shown_name
from paceline_lab.predict.remote import PATIENCE_S, answer, read_by_draft, read_by_target
from paceline_training.chat import mark_thinking
from paceline_training.corpus import Role, Row, TokenIds
from paceline_training.writing import Author, GenerationRecipe

CONNECT_S = 10.0
RETRY_MS = 200
"""Pause before a service without room gets the request again, where it doesn't name one."""
AnswerType = TypeVar("AnswerType")
_RowEvent = tuple[int, Row | None] | BaseException
"""A token of a row, a row that has ended, or why one could not be written."""


@dataclass(frozen=True)
class ServicesOptions:
    """The services that read: a target, draft services (none: matches alone), and their drafters (none: all of them).

    Drafters have the names of reports, or those of their services.
    """

    target: PeerSettings
    drafts: tuple[PeerSettings, ...] = ()
    drafters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.drafts or not self.drafters), "drafter", self.drafters, "left out without --draft-url")

    @property
    def words(self) -> str:
        """Return the services in words."""
        return ", ".join([f"target {self.target.address}", *(f"draft {each.address}" for each in self.drafts)])


@dataclass(frozen=True)
class RunningDrafter:
    """A drafter of a running service.

    Attributes:
        service_name: its name at the service.
        model: the model that it runs.
        target: the model that the target runs.
    """

    peer: DraftPeer
    service_name: str
    model: str
    target: str

    @property
    def welcome(self) -> Welcome:
        """Return the welcome of its service."""
        assert self.peer.link.welcome is not None, "it was linked to"
        return self.peer.link.welcome

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names by which the user may mean it: its name there, and that with which its service started."""
        welcome = self.welcome
        own = (self.service_name,)
        return (*own, welcome.default_name) if self.service_name == welcome.drafters[0] else own

    @property
    def name(self) -> str:
        """Return its name in reports: its model's, or its own where draft and target are one model."""
        return shown_name(self.service_name if self.model == self.target else self.model)


class ServicePasses:
    """Running services as a `PassSource`; a context manager, which keeps the links.

    Args:
        options: the services that read.
        tokenizer: the tokenizer of the model that the user names.

    Raises, when it is entered:
        PacelineError: a service that isn't there, or that refuses the link.
        VocabularyMismatch: services of another tokenizer.
        InvalidInput: a drafter that no service has.
        Unsupported: a drafter that reads features.
    """

    folder = "scored"

    def __init__(self, options: ServicesOptions, tokenizer: Tokenizer) -> None:
        self._options, self._tokenizer = options, tokenizer
        self._runner = asyncio.Runner()
        hello = Hello(secrets.token_hex(8))
        self._target = TargetPeer(TargetLink(options.target, hello))
        self._drafts = [DraftPeer(DraftLink(each, hello)) for each in options.drafts]
        self._drafters: dict[str, RunningDrafter] = {}
        self.feature_drafters: tuple[str, ...] = ()
        """Drafters that read the target's features: services can't rank tokens of a given text for them."""

    def __enter__(self) -> ServicePasses:
        try:
            self._run(self._connect())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._close()

    @property
    def fingerprint(self) -> Fingerprint:  # noqa: D102
        return self._welcome.fingerprint

    @property
    def max_length(self) -> int:  # noqa: D102
        return self._welcome.max_length

    @property
    def readers(self) -> Mapping[str, str]:  # noqa: D102
        drafters = {
            name: f"{each.service_name} {each.model} {each.welcome.fingerprint.numeric}"
            for name, each in self._drafters.items()
        }
        return {NGRAM: NGRAM, **drafters}

    @property
    def models(self) -> Mapping[str, str]:
        """Return the model that each drafter runs."""
        return {name: each.model for name, each in self._drafters.items()}

    @property
    def target_line(self) -> CostLine:
        """Return the times of the target's steps, as it states them; no points: it has stated none."""
        return self._target.costs.alone

    @property
    def draft_lines(self) -> Mapping[str, CostLine]:
        """Return the times of each drafter's steps, as its service states them."""
        return {name: each.peer.costs.line_of(each.service_name) for name, each in self._drafters.items()}

    def author(self, tokenizer: Tokenizer, recipe: GenerationRecipe, prompts: tuple[TokenIds, ...]) -> Author:  # noqa: D102
        return _RunningAuthor(self._target, self._runner, tokenizer, recipe, prompts)

    def read(  # noqa: D102
        self, text: SampleText, drafters: Collection[str]
    ) -> Iterator[tuple[str, TargetPositions | DrafterPositions]]:
        positions = self._run(_patiently(lambda: read_by_target(self._target, text)))
        yield TARGET, positions
        for name in drafters:
            if name == NGRAM:
                yield name, match_positions(text, positions, None)
            else:
                yield name, self._run(self._drafted(self._drafters[name], text, positions))

    @property
    def _links(self) -> list[PeerLink[Any, Any]]:
        return [self._target.link, *(each.link for each in self._drafts)]

    @property
    def _welcome(self) -> Welcome:
        assert self._target.link.welcome is not None, "it was linked to"
        return self._target.link.welcome

    def _run(self, work: Coroutine[Any, Any, AnswerType]) -> AnswerType:
        return self._runner.run(work)

    async def _drafted(self, drafter: RunningDrafter, text: SampleText, target: TargetPositions) -> DrafterPositions:
        return await _patiently(lambda: read_by_draft(drafter.peer, drafter.service_name, text, target))

    async def _connect(self) -> None:
        for link in self._links:
            await link.start()
        for link in self._links:
            welcome = await link.wait_up(CONNECT_S)
            self._check_tokenizer(link, welcome)
        self._choose()

    def _check_tokenizer(self, link: PeerLink[Any, Any], welcome: Welcome) -> None:
        theirs, model, ours = welcome.fingerprint.tokenizer, welcome.fingerprint.model, self._tokenizer.fingerprint
        if theirs and theirs != ours:
            raise VocabularyMismatch(
                f"tokenizer of the {link.name} at {link.address} = {theirs[:12]} (model {model!r}): "
                f"must be {ours[:12]}, that of the model that the plan names, in whose tokens the sample is read",
                metadata={"field": "tokenizer", "value": theirs, "limit": ours},
            )

    def _choose(self) -> None:
        """Choose the drafters that the options name, or all."""
        drafters: dict[str, RunningDrafter] = {}
        for each in (each for peer in self._drafts for each in _drafters_of(peer, self.fingerprint.model)):
            drafters.setdefault(each.name, each)
        by_name = {each: name for name, one in reversed(drafters.items()) for each in one.names}
        by_name |= {name: name for name in drafters}
        for name in self._options.drafters:
            require(name in by_name, "drafter", name, f"one that the draft services have: {', '.join(drafters)}")
        names = dict.fromkeys(by_name[name] for name in self._options.drafters or drafters)
        feature_drafters = tuple(
            name for name in names if drafters[name].welcome.need_of(drafters[name].service_name).any
        )
        if feature_drafters and self._options.drafters:
            raise Unsupported(
                f"drafter = {feature_drafters[0]!r}: reads the target's features, and what it would draft in a text "
                "that stands is read by passes on this machine alone: leave out --target-url"
            )
        self.feature_drafters = feature_drafters
        self._drafters = {name: drafters[name] for name in names if name not in feature_drafters}

    def _close(self) -> None:
        async def close() -> None:
            for link in self._links:
                await link.close()

        self._run(close())
        self._runner.close()


def _drafters_of(peer: DraftPeer, target: str) -> Iterator[RunningDrafter]:
    """Yield a service's drafters: the first has the service's model, others have the models in their names."""
    welcome = peer.link.welcome
    assert welcome is not None, "it was linked to"
    for place, name in enumerate(welcome.drafters):
        yield RunningDrafter(peer, name, name.partition(":")[2] if place else welcome.fingerprint.model, target)


async def _patiently(ask: Callable[[], Awaitable[AnswerType]]) -> AnswerType:
    """Repeat a call while the service has no room, for at most `PATIENCE_S`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await ask()
        except Overloaded as error:
            pause_s = (error.retry_after_ms or RETRY_MS) / 1e3
            if time.monotonic() + pause_s > deadline_s:
                raise
            await asyncio.sleep(pause_s)


@dataclass(frozen=True)
class _RunningAuthor:
    """A running target as an author."""

    peer: TargetPeer
    runner: asyncio.Runner
    tokenizer: Tokenizer
    recipe: GenerationRecipe
    prompts: tuple[TokenIds, ...]

    def write(self, rows: range) -> Iterator[tuple[int, Row | None]]:
        """Write as `Author` does, all rows at once."""
        events: asyncio.Queue[_RowEvent] = asyncio.Queue()
        tasks = self.runner.run(self._begin(rows, events))
        try:
            rows_left = len(rows)
            while rows_left:
                event = self.runner.run(events.get())
                if isinstance(event, BaseException):
                    raise event
                rows_left -= event[1] is not None
                yield event
        finally:
            for task in tasks:
                task.cancel()

    async def _begin(self, rows: range, events: asyncio.Queue[_RowEvent]) -> list[asyncio.Task[None]]:
        def note_failure(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                events.put_nowait(error)

        tasks = [asyncio.create_task(self._write(number, events)) for number in rows]
        for task in tasks:
            task.add_done_callback(note_failure)
        return tasks

    async def _write(self, number: int, events: asyncio.Queue[_RowEvent]) -> None:
        async for row in self._tokens(number):
            events.put_nowait((number, row))

    async def _tokens(self, number: int) -> AsyncIterator[Row | None]:
        recipe, prompt = self.recipe, self.prompts[number]
        temperature = recipe.temperature_of(number)
        params, noise = SamplingParams(temperature=temperature), NoiseKey(recipe.seed, number)
        tokens = [*prompt]
        ends = self.tokenizer.eos_token_ids
        longest = recipe.longest(prompt)
        async for token in answer(self.peer, prompt, params, noise, longest, ends):
            tokens.append(token)
            yield None
        token_ids = np.array(tokens[:longest], np.int32)
        roles = np.where(np.arange(token_ids.size) < len(prompt), Role.FORCED, Role.ANSWER).astype(np.int8)
        yield Row(token_ids, mark_thinking(token_ids, roles, self.tokenizer), temperature)
