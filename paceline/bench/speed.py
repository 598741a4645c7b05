"""`paceline bench speed`: every drafter beside target-only, in one interleaved run.

A turn is target-only on our fastest services, target-only on the drafter's own
services where these have fewer threads (the same split, drafting off), and the
drafted generation, with one prompt and one seed; every second turn of a prompt
runs them backwards. Passes over all turns repeat until each has its pairs, so a
disturbance of the machine is spread over all figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from paceline.bench.groups import WARM_UP_TOKENS, Runner
from paceline.bench.prompt_set import Prompt
from paceline.client import Generation
from paceline.supervisor import NO_DRAFTER
from paceline.types import Acceptance, GenerateRequest, SamplingParams, SpeculationSettings, require

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
        if self.drafter == NO_DRAFTER:
            return SpeculationSettings(off=True)
        return SpeculationSettings(drafter=self.drafter.partition(":")[0], num_draft_tokens=self.num_draft_tokens)


@dataclass(frozen=True)
class SpeedPlan:
    """What is measured.

    Attributes:
        pairs: of each kind, temperature and variant, spread over the kind's prompts.
        tokens: of each generation, end-of-text ignored so that all are equally long.
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

    @property
    def drafters(self) -> tuple[str, ...]:
        """The services that the plan needs beside our fastest."""
        return tuple(dict.fromkeys(variant.drafter for variant in self.variants))

    def turns(self) -> Iterator[Turn]:
        """In the order in which they run: pass by pass."""
        for number in range(self.pairs):
            for prompts, temperature, variant in product(self.prompts.values(), self.temperatures, self.variants):
                prompt = prompts[number % len(prompts)]
                backwards = (number // len(prompts)) % 2 == 1
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

    def request(self, speculation: SpeculationSettings) -> GenerateRequest:
        """The generation, the same on both sides but for speculation."""
        return GenerateRequest(
            messages=self.prompt.messages,
            sampling=SamplingParams(temperature=self.temperature),
            seed=self.seed,
            max_new_tokens=self.tokens,
            ignore_eos=True,
            acceptance=self.variant.acceptance,
            speculation=speculation,
        )

    @property
    def same_text(self) -> bool:
        """Whether both sides promise the same tokens."""
        return self.variant.acceptance is Acceptance.COUPLED or self.temperature == 0


@dataclass(frozen=True)
class Run:
    """The figures of one generation; lists have one entry a round.

    Attributes:
        wall_s: at the client, prompt included.
        tokens_per_second: after the first round's tokens; 1000 ÷ this is the time per output token in ms.
        steps: (rows, ms) of the target's own step.
        verify_ms: wire and target, as the coordinator sees it.
    """

    token_ids: tuple[int, ...]
    wall_s: float
    time_to_first_token_ms: float
    tokens_per_second: float
    rounds: int
    spec_rounds: int
    proposed: int
    accepted: int
    cache_hits: int
    steps: tuple[tuple[int, float], ...]
    verify_ms: tuple[float, ...]
    draft_wait_ms: tuple[float, ...]

    @classmethod
    def of(cls, generation: Generation, wall_s: float) -> Run:
        """Keep what reports are made of."""
        stats = generation.stats
        records = stats.records
        return cls(
            token_ids=generation.token_ids,
            wall_s=wall_s,
            time_to_first_token_ms=stats.time_to_first_token_ms,
            tokens_per_second=stats.tokens_per_second,
            rounds=stats.rounds,
            spec_rounds=stats.num_spec_steps,
            proposed=stats.num_draft_tokens,
            accepted=stats.num_accepted_draft_tokens,
            cache_hits=stats.cache_hits,
            steps=tuple((r.target.rows, r.target.forward_ms + r.target.sample_ms) for r in records),
            verify_ms=tuple(r.wire_ms + r.target.service_ms for r in records),
            draft_wait_ms=tuple(r.draft_wait_ms for r in records),
        )


@dataclass(frozen=True)
class Pair:
    """One turn's runs; `split` None: the drafter's services have the fastest's own threads."""

    turn: Turn
    plain: Run
    drafted: Run
    split: Run | None = None

    @property
    def ratio(self) -> float:
        """Drafted tokens a second ÷ target-only's on our fastest services."""
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


def measure(runner: Runner, request: GenerateRequest) -> Run:
    """Run one generation under the client's clock."""
    begun = time.perf_counter()
    generation = runner.generate(request)
    return Run.of(generation, time.perf_counter() - begun)


def run_turn(turn: Turn, groups: Mapping[str, Runner]) -> Pair:
    """Run one turn on `none` and on the variant's own services."""
    fastest, drafting = groups[NO_DRAFTER], groups[turn.variant.drafter]
    off = turn.request(SpeculationSettings(off=True))
    sides = [("plain", fastest, off), ("drafted", drafting, turn.request(turn.variant.speculation))]
    if drafting.target_threads != fastest.target_threads:
        sides.insert(1, ("split", drafting, off))
    runs = {name: measure(runner, request) for name, runner, request in sides[:: -1 if turn.backwards else 1]}
    return Pair(turn, runs["plain"], runs["drafted"], runs.get("split"))


def warm_up(plan: SpeedPlan, groups: Mapping[str, Runner]) -> None:
    """A short generation of each kind of work that will be timed, on each group."""
    prompt = next(iter(plan.prompts.values()))[0]
    for variant in (Variant(NO_DRAFTER), *plan.variants):
        for temperature in plan.temperatures:
            turn = Turn(0, prompt, temperature, variant, plan.seed, WARM_UP_TOKENS, False)
            measure(groups[variant.drafter], turn.request(variant.speculation))


def run_speed(
    plan: SpeedPlan, groups: Mapping[str, Runner], on_pair: Callable[[Pair], None] = lambda pair: None
) -> list[Pair]:
    """Run the whole plan; `on_pair` sees each pair as it is done.

    Raises:
        PacelineError: as the services sent it.
    """
    warm_up(plan, groups)
    pairs = []
    for turn in plan.turns():
        pairs.append(run_turn(turn, groups))
        on_pair(pairs[-1])
    return pairs
