"""`paceline bench peers`: the same prompts on Paceline and on other systems, in one interleaved run.

Every system is up at once, each mode of a peer a process of its own, and one is
busy at a time. A pass asks every contestant for one prompt of each kind, greedy,
or for as many at once as there are users, beginning with another contestant
each time. One that fails is named with its reason and takes no further part;
the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Protocol, TypeVar

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import PacelineError, require
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import NONE
from paceline.protocol.sampling import SamplingParams
from paceline_lab.bench.peers.process import Answer, PeerProcess, TokenIds
from paceline_lab.bench.prompts import Prompt
from paceline_lab.bench.speed.groups import GenerationRunner, cpu_seconds, resident_bytes
from paceline_lab.bench.speed.settings import short_name

OURS = "paceline"
REPRODUCIBLE = f"{OURS} reproducible"
PLAIN = "plain"
WARM_UP_TOKENS = 16
MOST_USERS = 64


class Participant(Protocol):
    """A participant of a contest."""

    @property
    def name(self) -> str:
        """System and mode."""


Entrant = TypeVar("Entrant", bound=Participant)
Result = TypeVar("Result")


class Contestant(Participant, Protocol):
    """One way of one system to generate."""

    @property
    def system(self) -> str:
        """Name of the system."""

    @property
    def mode(self) -> str:
        """`plain`, or how it speculates."""

    @property
    def processes(self) -> Sequence[int]:
        """Processes whose CPU time and memory count, their children's included."""

    @property
    def start_s(self) -> float:
        """How long it took to start."""

    def generate(self, prompts: Sequence[TokenIds], max_tokens: int, stop_token_ids: TokenIds) -> Answer:
        """Run greedy generations at once, each up to `max_tokens` or the first stop id. Raises PacelineError."""


@dataclass(frozen=True)
class OurContestant:
    """Paceline with one drafter, or none; the client's own CPU time counts too."""

    group: GenerationRunner
    num_draft_tokens: int | None = None
    system: str = OURS
    start_s: float = 0.0

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.system} {self.mode}"

    @property
    def mode(self) -> str:  # noqa: D102
        return PLAIN if self.group.name == NONE else short_name(self.group.name)

    @property
    def processes(self) -> Sequence[int]:  # noqa: D102
        return self.group.processes

    def generate(self, prompts: Sequence[TokenIds], max_tokens: int, stop_token_ids: TokenIds) -> Answer:  # noqa: D102
        kind = self.group.name.partition(":")[0]
        off = kind == NONE
        requests = [
            GenerateRequest(
                token_ids=tuple(token_ids),
                sampling=SamplingParams(temperature=0).with_defaults(),
                max_new_tokens=max_tokens,
                ignore_eos=not stop_token_ids,
                speculation=SpeculationSettings(
                    off=off, drafter="" if off else kind, num_draft_tokens=self.num_draft_tokens
                ),
            )
            for token_ids in prompts
        ]
        with ThreadPoolExecutor(len(requests)) as users:
            start_s = time.perf_counter()
            generations = list(users.map(self.group.generate, requests))
            wall_s = time.perf_counter() - start_s
        texts = tuple(each.token_ids for each in generations)
        return Answer(texts, wall_s, sum(each.stats.rounds for each in generations))


@dataclass(frozen=True)
class PeerContestant:
    """One mode of a peer, in its worker process."""

    system: str
    mode: str
    process: PeerProcess
    start_s: float = 0.0

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.system} {self.mode}"

    @property
    def processes(self) -> Sequence[int]:  # noqa: D102
        return self.process.processes

    def generate(self, prompts: Sequence[TokenIds], max_tokens: int, stop_token_ids: TokenIds) -> Answer:  # noqa: D102
        return self.process.generate(prompts, max_tokens, stop_token_ids)


@dataclass(frozen=True)
class ContestRun:
    """One contestant, one prompt of each of its users.

    `wall_s` includes the prompts, `token_ids` no stop id, those of all users one after the other; `resident_bytes`
    are those of all its processes at the end.
    """

    system: str
    mode: str
    kind: str
    users: int
    prompt: str
    number: int
    token_ids: tuple[int, ...]
    wall_s: float
    cpu_s: float
    target_steps: int
    resident_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of the whole requests, of all users together."""
        return len(self.token_ids) / self.wall_s if self.wall_s > 0 else 0.0


@dataclass
class Contest:
    """Runs measured so far, failures with their reasons (`system mode` → reason), starts, and the peers' versions."""

    runs: list[ContestRun] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    starts_s: dict[tuple[str, str], float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)

    def attempt(self, contestant: Entrant, alive: list[Entrant], work: Callable[[Entrant], Result]) -> Result | None:
        """Let a contestant work; a contestant that fails is noted with the reason, and drops out of `alive`."""
        if contestant not in alive:
            return None
        try:
            return work(contestant)
        except PacelineError as error:
            self.failures[contestant.name] = error.message
            alive.remove(contestant)
            return None


@dataclass(frozen=True)
class PromptWave:
    """Prompts of a kind that come at once; its number among those of the kind and so many users, the kind's place."""

    prompts: Sequence[Prompt]
    number: int
    place: int


@dataclass(frozen=True)
class ContestPlan:
    """Requests to every contestant.

    Attributes:
        passes: prompts of each kind, for each number of users.
        tokens: of each answer, or up to its own end.
        users: how many prompts of a kind come at once, one number after the other.
    """

    prompts: Mapping[str, Sequence[Prompt]]
    passes: int = 9
    tokens: int = 128
    users: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        require(self.passes >= 1, "passes", self.passes, "at least 1")
        require(self.tokens >= 1, "tokens", self.tokens, "at least 1")
        require(bool(self.users), "users", self.users, "one number or more")
        for users in self.users:
            require(1 <= users <= MOST_USERS, "users", users, f"in [1, {MOST_USERS}]")

    def waves(self) -> Iterator[PromptWave]:
        """Yield all waves: of each kind and number of users a first one, then a second one, and so on."""
        for first in range(self.passes):
            for users in self.users:
                for place, prompts in enumerate(self.prompts.values()):
                    if first % users == 0:
                        at_once = [prompts[(first + user) % len(prompts)] for user in range(users)]
                        yield PromptWave(at_once, first // users, place)


def run_contest(
    plan: ContestPlan,
    contestants: Sequence[Contestant],
    tokenizer: Tokenizer,
    contest: Contest,
    on_run: Callable[[ContestRun], None] = lambda run: None,
) -> None:
    """Run the whole plan into `contest`; contestants that fail drop out."""
    alive = list(contestants)
    contest.starts_s |= {(one.system, one.mode): one.start_s for one in contestants}
    warm_up = replace(plan, tokens=WARM_UP_TOKENS)
    first = next(plan.waves())
    for contestant in contestants:
        contest.attempt(contestant, alive, lambda one: _run(one, first, warm_up, tokenizer))
    for wave in plan.waves():
        shift = (wave.number + wave.place) % max(1, len(alive))
        for contestant in alive[shift:] + alive[:shift]:
            work = partial(_run, wave=wave, plan=plan, tokenizer=tokenizer)
            run = contest.attempt(contestant, alive, work)
            if run is not None:
                contest.runs.append(run)
                on_run(run)


def _run(contestant: Contestant, wave: PromptWave, plan: ContestPlan, tokenizer: Tokenizer) -> ContestRun:
    prompts = wave.prompts
    stop = _stop_ids(prompts, tokenizer)
    before = cpu_seconds(contestant.processes)
    answers = list(_answers(contestant, prompts, plan.tokens, tokenizer))
    cpu_s = cpu_seconds(contestant.processes) - before
    texts = chain.from_iterable(answer.texts for answer in answers)
    return ContestRun(
        system=contestant.system,
        mode=contestant.mode,
        kind=prompts[0].kind,
        users=len(prompts),
        prompt=prompts[0].name,
        number=wave.number,
        token_ids=tuple(i for text in texts for i in text if i not in stop),
        wall_s=sum(answer.wall_s for answer in answers),
        cpu_s=cpu_s,
        target_steps=sum(answer.target_steps for answer in answers),
        resident_bytes=resident_bytes(contestant.processes),
    )


def _stop_ids(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> TokenIds:
    return sorted(tokenizer.eos_token_ids) if prompts[0].ends else ()


def _answers(
    contestant: Contestant, prompts: Sequence[Prompt], tokens: int, tokenizer: Tokenizer
) -> Iterator[Answer]:
    """Yield a contestant's answers to the prompts' first chats at once, then to their second ones, and so on.

    Chats that follow each other go on behind its own answers.
    """
    stop = _stop_ids(prompts, tokenizer)
    histories: list[tuple[ChatMessage, ...]] = [() for _ in prompts]
    for chats in zip_longest(*(prompt.chats for prompt in prompts)):
        chats_now = {user: (*histories[user], *chat) for user, chat in enumerate(chats) if chat is not None}
        answer = contestant.generate([tokenizer.render_chat(chat) for chat in chats_now.values()], tokens, stop)
        yield answer
        for (user, chat), text in zip(chats_now.items(), answer.texts, strict=True):
            if prompts[user].follows:
                words = tokenizer.decode([token_id for token_id in text if token_id not in stop])
                histories[user] = (*chat, ChatMessage("assistant", words))
