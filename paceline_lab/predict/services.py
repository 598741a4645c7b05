"""Services that run as a source of passes: their texts, what they say of them, and what their steps take."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from coordinator.sessions.draft_pool import DraftPeer
from coordinator.sessions.target_pool import TargetPeer
from paceline.costs.cost_line import CostLine
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
"""Pause before a service without room is asked again, where it doesn't say one."""
Said = TypeVar("Said")
_Written = tuple[int, Row | None] | BaseException
"""A token of a row, a row that has ended, or why one could not be written."""


@dataclass(frozen=True)
class ServicesWanted:
    """Which services read: a target, draft services (none: matches alone), and which of their drafters (none: all).

    Drafters are named as reports name them, or as their service does.
    """

    target: PeerSettings
    drafts: tuple[PeerSettings, ...] = ()
    drafters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.drafts or not self.drafters), "drafter", self.drafters, "left out without --draft-url")

    @property
    def words(self) -> str:
        """Who they are."""
        return ", ".join([f"target {self.target.address}", *(f"draft {each.address}" for each in self.drafts)])


@dataclass(frozen=True)
class RunningDrafter:
    """A drafter of a running service.

    Attributes:
        served: its name there.
        model: what it runs.
        target: what the target runs.
    """

    peer: DraftPeer
    served: str
    model: str
    target: str

    @property
    def welcome(self) -> Welcome:
        """Of its service."""
        assert self.peer.link.welcome is not None, "it was linked to"
        return self.peer.link.welcome

    @property
    def names(self) -> tuple[str, ...]:
        """What it is asked for by: its name there, and that which its service was started with."""
        welcome = self.welcome
        return (self.served, welcome.default_name) if self.served == welcome.drafters[0] else (self.served,)

    @property
    def name(self) -> str:
        """In reports: what it runs; a draft that is part of its target has the target's name, and goes by its own."""
        return shown_name(self.served if self.model == self.target else self.model)


class ServicePasses:
    """Running services as a `PassSource`; a context manager, which keeps the links.

    Args:
        wanted: who reads.
        tokenizer: of the model that the user names.

    Raises, when it is entered:
        PacelineError: a service that isn't there, or that refuses the link.
        VocabularyMismatch: services of another tokenizer.
        InvalidInput: a drafter that no service has.
        Unsupported: a drafter that reads features.
    """

    folder = "scored"

    def __init__(self, wanted: ServicesWanted, tokenizer: Tokenizer) -> None:
        self._wanted, self._tokenizer = wanted, tokenizer
        self._runner = asyncio.Runner()
        hello = Hello(secrets.token_hex(8))
        self._target = TargetPeer(TargetLink(wanted.target, hello))
        self._drafts = [DraftPeer(DraftLink(each, hello)) for each in wanted.drafts]
        self._drafters: dict[str, RunningDrafter] = {}
        self.left_out: tuple[str, ...] = ()
        """Drafters that read the target's features, whose ranks in a text that stands are not to be had."""

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
            name: f"{each.served} {each.model} {each.welcome.fingerprint.numeric}"
            for name, each in self._drafters.items()
        }
        return {NGRAM: NGRAM, **drafters}

    @property
    def models(self) -> Mapping[str, str]:
        """What each drafter runs."""
        return {name: each.model for name, each in self._drafters.items()}

    @property
    def target_line(self) -> CostLine:
        """What the target's steps take, as it says; no points: it has not said."""
        return self._target.costs.alone

    @property
    def draft_lines(self) -> Mapping[str, CostLine]:
        """The same of each drafter's."""
        return {name: each.peer.costs.line_of(each.served) for name, each in self._drafters.items()}

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

    def _run(self, work: Coroutine[Any, Any, Said]) -> Said:
        return self._runner.run(work)

    async def _drafted(self, drafter: RunningDrafter, text: SampleText, target: TargetPositions) -> DrafterPositions:
        return await _patiently(lambda: read_by_draft(drafter.peer, drafter.served, text, target))

    async def _connect(self) -> None:
        for link in self._links:
            await link.start()
        for link in self._links:
            welcome = await link.wait_up(CONNECT_S)
            self._check_tokenizer(link, welcome)
        self._choose()

    def _check_tokenizer(self, link: PeerLink[Any, Any], welcome: Welcome) -> None:
        found, model, wanted = welcome.fingerprint.tokenizer, welcome.fingerprint.model, self._tokenizer.fingerprint
        if found and found != wanted:
            raise VocabularyMismatch(
                f"tokenizer of the {link.name} at {link.address} = {found[:12]} (model {model!r}): "
                f"must be {wanted[:12]}, that of the model that the plan names, in whose tokens the sample is read",
                metadata={"field": "tokenizer", "value": found, "limit": wanted},
            )

    def _choose(self) -> None:
        """The wanted drafters of those on offer."""
        offered: dict[str, RunningDrafter] = {}
        for each in (each for peer in self._drafts for each in _drafters_of(peer, self.fingerprint.model)):
            offered.setdefault(each.name, each)
        by_name = {each: name for name, one in reversed(offered.items()) for each in one.names}
        by_name |= {name: name for name in offered}
        for name in self._wanted.drafters:
            require(name in by_name, "drafter", name, f"one that the draft services have: {', '.join(offered)}")
        chosen = dict.fromkeys(by_name[name] for name in self._wanted.drafters or offered)
        featured = tuple(name for name in chosen if offered[name].welcome.need_of(offered[name].served).any)
        if featured and self._wanted.drafters:
            raise Unsupported(
                f"drafter = {featured[0]!r}: reads the target's features, and what it would draft in a text that "
                "stands is read by passes on this machine alone: leave out --target-url"
            )
        self.left_out = featured
        self._drafters = {name: offered[name] for name in chosen if name not in featured}

    def _close(self) -> None:
        async def close() -> None:
            for link in self._links:
                await link.close()

        self._run(close())
        self._runner.close()


def _drafters_of(peer: DraftPeer, target: str) -> Iterator[RunningDrafter]:
    """The first is called after its service's model, the others after what their names say."""
    welcome = peer.link.welcome
    assert welcome is not None, "it was linked to"
    for place, served in enumerate(welcome.drafters):
        yield RunningDrafter(peer, served, served.partition(":")[2] if place else welcome.fingerprint.model, target)


async def _patiently(ask: Callable[[], Awaitable[Said]]) -> Said:
    """Ask again while there is no room, for a while."""
    given_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await ask()
        except Overloaded as error:
            pause_s = (error.retry_after_ms or RETRY_MS) / 1e3
            if time.monotonic() + pause_s > given_up:
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
        """As `Author`: all rows at once."""
        said: asyncio.Queue[_Written] = asyncio.Queue()
        tasks = self.runner.run(self._begin(rows, said))
        try:
            left = len(rows)
            while left:
                event = self.runner.run(said.get())
                if isinstance(event, BaseException):
                    raise event
                left -= event[1] is not None
                yield event
        finally:
            for task in tasks:
                task.cancel()

    async def _begin(self, rows: range, said: asyncio.Queue[_Written]) -> list[asyncio.Task[None]]:
        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                said.put_nowait(error)

        tasks = [asyncio.create_task(self._write(number, said)) for number in rows]
        for task in tasks:
            task.add_done_callback(ended)
        return tasks

    async def _write(self, number: int, said: asyncio.Queue[_Written]) -> None:
        async for row in self._tokens(number):
            said.put_nowait((number, row))

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
        written = np.array(tokens[:longest], np.int32)
        roles = np.where(np.arange(written.size) < len(prompt), Role.FORCED, Role.ANSWER).astype(np.int8)
        yield Row(written, mark_thinking(written, roles, self.tokenizer), temperature)
