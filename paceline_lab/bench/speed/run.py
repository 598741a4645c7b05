"""`paceline bench speed`: every drafter beside target-only, in one interleaved run.

A turn is target-only on our fastest services, target-only on the drafter's own
services where these have fewer threads (the same split, drafting off), and the
drafted generation, with one prompt and one seed; every second turn, of each prompt
too, runs them backwards. Passes over all turns repeat until each has its pairs, so a
disturbance of the machine is spread over all figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from paceline.client import Generation
from paceline.protocol.errors import require
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import NONE, Acceptance
from paceline.protocol.records import GenerationStats
from paceline.protocol.sampling import SamplingParams
from paceline_lab.bench.prompts import Prompt
from paceline_lab.bench.speed.groups import WARM_UP_TOKENS, GenerationRunner

MAX_PAIRS = 10_000


@dataclass(frozen=True)
class Variant:
    """One way to draft; `none` is target-only once more, and shows what the noise of the run does to a ratio.

    Attributes:
        drafter: as `paceline serve` takes it.
        num_draft_tokens: None leaves it to the coordinator.
    """

    drafter: str
    acceptance: Acceptance = Acceptance.COUPLED
    num_draft_tokens: int | None = None

    @property
    def name(self) -> str:
        """Short, for tables; holds no folder of this machine."""
        kind, colon, rest = self.drafter.partition(":")
        parts = [kind + colon + rest.rstrip("/").rpartition("/")[2]]
        if self.acceptance is not Acceptance.COUPLED:
            parts.append(self.acceptance.value)
        if self.num_draft_tokens is not None:
            parts.append(f"k={self.num_draft_tokens}")
        return " ".join(parts)

    @property
    def speculation(self) -> SpeculationSettings:
        """What a request asks for."""
        if self.drafter == NONE:
            return SpeculationSettings(off=True)
        return SpeculationSettings(drafter=self.drafter.partition(":")[0], num_draft_tokens=self.num_draft_tokens)


@dataclass(frozen=True)
class SpeedPlan:
    """What is measured.

    Attributes:
        pairs: of each kind, temperature and variant, spread over the kind's prompts.
        tokens: of each generation, its own end ignored; at most so many where a prompt's answers end.
        seed: of the first pass; each pass adds one.
    """

    prompts: Mapping[str, Sequence[Prompt]]
    temperatures: Sequence[float] = (0.0,)
    variants: Sequence[Variant] = (Variant("ngram"),)
    pairs: int = 9
    tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        require(1 <= self.pairs <= MAX_PAIRS, "pairs", self.pairs, f"in [1, {MAX_PAIRS}]")
        require(self.tokens >= 2, "tokens", self.tokens, "at least 2, to have a time per output token")
        require(len(self.temperatures) > 0, "temperature", self.temperatures, "one or more")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        require(len(self.variants) > 0, "drafter", self.variants, "one or more")
        for variant in self.variants:
            SpeculationSettings(num_draft_tokens=variant.num_draft_tokens)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The services that the plan needs beside our fastest."""
        return tuple(dict.fromkeys(variant.drafter for variant in self.variants))

    def turns(self) -> Iterator[Turn]:
        """In the order in which they run: pass by pass."""
        for number in range(self.pairs):
            for prompts, temperature, variant in product(self.prompts.values(), self.temperatures, self.variants):
                prompt = prompts[number % len(prompts)]
                backwards = (number % len(prompts) + number // len(prompts)) % 2 == 1
                yield Turn(number, prompt, temperature, variant, self.seed + number, self.tokens, backwards)

    def __len__(self) -> int:
        return self.pairs * len(self.prompts) * len(self.temperatures) * len(self.variants)


@dataclass(frozen=True)
class Turn:
    """One pair to run; `backwards`: the drafted generation comes first."""

    number: int
    prompt: Prompt
    temperature: float
    variant: Variant
    seed: int
    tokens: int
    backwards: bool

    def requests(self, speculation: SpeculationSettings) -> list[GenerateRequest]:
        """One generation a chat, the same on both sides but for speculation."""
        return [
            GenerateRequest(
                messages=chat,
                sampling=SamplingParams(temperature=self.temperature).stated(),
                seed=self.seed,
                max_new_tokens=self.tokens,
                ignore_eos=not self.prompt.ends,
                acceptance=self.variant.acceptance,
                speculation=speculation,
            )
            for chat in self.prompt.chats
        ]

    @property
    def same_text(self) -> bool:
        """Whether both sides promise the same tokens."""
        return self.variant.acceptance is Acceptance.COUPLED or self.temperature == 0


@dataclass(frozen=True)
class SpeedRun:
    """The figures of one side: a generation, or several in a row; lists have one entry a round.

    Attributes:
        wall_s: at the client, prompts included.
        first_token_ms: of each generation.
        decoded_tokens, decode_s: after the first round of each generation.
        target_s: the target's own steps in the same rounds.
        steps: (rows, ms) of the target's own step.
        accepted_histogram: rounds with a proposal, by how many of its tokens were accepted.
        feature_bytes: of the target's hidden states that came for the drafter, prompts' included.
        verify_ms: wire and target, as the coordinator sees it.
    """

    token_ids: tuple[int, ...]
    wall_s: float
    first_token_ms: tuple[float, ...]
    decoded_tokens: int
    decode_s: float
    target_s: float
    rounds: int
    spec_rounds: int
    proposed: int
    accepted: int
    cache_hits: int
    steps: tuple[tuple[int, float], ...]
    verify_ms: tuple[float, ...]
    draft_wait_ms: tuple[float, ...]
    accepted_histogram: tuple[int, ...] = ()
    feature_bytes: int = 0

    @classmethod
    def of(cls, generations: Sequence[Generation], wall_s: float) -> SpeedRun:
        """Keep what reports are made of."""
        stats = [generation.stats for generation in generations]
        records = [record for each in stats for record in each.records]
        decoded = [max(0, each.committed - _first_tokens(each)) for each in stats]
        return cls(
            token_ids=tuple(token_id for generation in generations for token_id in generation.token_ids),
            wall_s=wall_s,
            first_token_ms=tuple(each.time_to_first_token_ms for each in stats),
            decoded_tokens=sum(decoded),
            decode_s=sum(
                tokens / each.tokens_per_second
                for tokens, each in zip(decoded, stats, strict=True)
                if each.tokens_per_second > 0
            ),
            target_s=sum(r.target.forward_ms + r.target.sample_ms for each in stats for r in each.records[1:]) / 1e3,
            rounds=sum(each.rounds for each in stats),
            spec_rounds=sum(each.num_spec_steps for each in stats),
            proposed=sum(each.num_draft_tokens for each in stats),
            accepted=sum(each.num_accepted_draft_tokens for each in stats),
            cache_hits=sum(each.cache_hits for each in stats),
            steps=tuple((r.target.rows, r.target.forward_ms + r.target.sample_ms) for r in records),
            verify_ms=tuple(r.wire_ms + r.target.service_ms for r in records),
            draft_wait_ms=tuple(r.draft_wait_ms for r in records),
            accepted_histogram=_histogram([r.accepted for r in records if r.proposed]),
            feature_bytes=sum(each.feature_bytes for each in stats),
        )

    @property
    def tokens_per_second(self) -> float:
        """After the first round's tokens; 1000 ÷ this is the time per output token in ms."""
        return _ratio(self.decoded_tokens, self.decode_s)


def _histogram(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values.count(value) for value in range(max(values, default=-1) + 1))


def _first_tokens(stats: GenerationStats) -> int:
    """Tokens that the first round committed."""
    return stats.records[0].accepted + 1 if stats.records else 0


@dataclass(frozen=True)
class SpeedPair:
    """One turn's runs; `split` None: the drafter's services have the fastest's own threads."""

    turn: Turn
    plain: SpeedRun
    drafted: SpeedRun
    split: SpeedRun | None = None

    @property
    def is_measured(self) -> bool:
        """Whether both answers are long enough to have a speed after their first round."""
        return self.plain.tokens_per_second > 0 and self.drafted.tokens_per_second > 0

    @property
    def ratio(self) -> float:
        """Drafted tokens per second ÷ target-only's on our fastest services."""
        return _ratio(self.drafted.tokens_per_second, self.plain.tokens_per_second)

    @property
    def split_ratio(self) -> float:
        """The same against target-only at the same split."""
        return _ratio(self.drafted.tokens_per_second, (self.split or self.plain).tokens_per_second)

    @property
    def request_ratio(self) -> float:
        """Whole requests, prompt included, at the client."""
        return _ratio(self.plain.wall_s, self.drafted.wall_s)

    @property
    def difference(self) -> int | None:
        """Index of the first token that differs from target-only's on the same services; None: equal."""
        return first_difference((self.split or self.plain).token_ids, self.drafted.token_ids)


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else 0.0


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or that one of them lacks; None: equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def measure(runner: GenerationRunner, requests: Sequence[GenerateRequest], *, follows: bool = False) -> SpeedRun:
    """Run generations one after the other under the client's clock.

    Args:
        runner: where they run.
        requests: chats.
        follows: each request goes on behind the ones before it and their answers.
    """
    started = time.perf_counter()
    generations: list[Generation] = []
    history: tuple[ChatMessage, ...] = ()
    for request in requests:
        asked = (*history, *request.messages)
        generations.append(runner.generate(replace(request, messages=asked)))
        history = (*asked, ChatMessage("assistant", generations[-1].text)) if follows else ()
    return SpeedRun.of(generations, time.perf_counter() - started)


def run_turn(turn: Turn, groups: Mapping[str, GenerationRunner]) -> SpeedPair:
    """Run one turn on `none` and on the variant's own services."""
    fastest, drafting = groups[NONE], groups[turn.variant.drafter]
    off = turn.requests(SpeculationSettings(off=True))
    sides = [("plain", fastest, off), ("drafted", drafting, turn.requests(turn.variant.speculation))]
    if drafting.target_threads != fastest.target_threads:
        sides.insert(1, ("split", drafting, off))
    runs = {
        name: measure(runner, requests, follows=turn.prompt.follows)
        for name, runner, requests in sides[:: -1 if turn.backwards else 1]
    }
    return SpeedPair(turn, runs["plain"], runs["drafted"], runs.get("split"))


def warm_up(plan: SpeedPlan, groups: Mapping[str, GenerationRunner]) -> None:
    """A short generation of each kind of work that will be measured, on each group."""
    prompt = next(iter(plan.prompts.values()))[0]
    for variant in (Variant(NONE), *plan.variants):
        for temperature in plan.temperatures:
            turn = Turn(0, prompt, temperature, variant, plan.seed, WARM_UP_TOKENS, backwards=False)
            measure(groups[variant.drafter], turn.requests(variant.speculation)[:1])


def run_speed(
    plan: SpeedPlan,
    groups: Mapping[str, GenerationRunner],
    on_pair: Callable[[SpeedPair], None] = lambda pair: None,
    *,
    until: float = math.inf,
) -> list[SpeedPair]:
    """Run the plan, whole or to the end of the pass in which `until` comes, on the monotonic clock.

    `on_pair` sees each pair as it is done.

    Raises:
        PacelineError: as the services sent it.
    """
    warm_up(plan, groups)
    pairs: list[SpeedPair] = []
    for turn in plan.turns():
        if pairs and turn.number != pairs[-1].turn.number and time.monotonic() > until:
            break
        pairs.append(run_turn(turn, groups))
        on_pair(pairs[-1])
    return pairs
