"""`paceline bench speed`: target-only and every way to draft, in turns.

A turn is one prompt at one temperature with one seed under every setting. Target-only runs twice, so that each turn
has its own noise; where a drafter's services give the target fewer threads, target-only runs there, too. The order is
drawn anew for each turn: what the machine does meanwhile meets every setting alike. A short generation before each
turn brings the prompt into the services' caches, which settings share; else the first of them alone would pay for it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from paceline.client import Generation
from paceline.protocol.errors import require
from paceline.protocol.generation import ChatMessage, GenerateRequest
from paceline.protocol.proposal import Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline_lab.bench.prompts import Prompt
from paceline_lab.bench.speed.groups import WARM_UP_TOKENS, GenerationRunner
from paceline_lab.bench.speed.settings import PLAIN, SpeedSetting

MAX_PAIRS = 10_000
PRIMING_TOKENS = 2

TurnKey = tuple[str, str, int, float]
"""Kind, prompt, pass and temperature."""


@dataclass(frozen=True)
class SpeedPlan:
    """Settings, prompts and sizes of a measurement.

    Attributes:
        pairs: turns of each kind and temperature, spread over the kind's prompts.
        tokens: length of each generation, its own end ignored; at most so many where a prompt's answers end.
        seed: seed of the first pass; each pass adds one.
    """

    prompts: Mapping[str, Sequence[Prompt]]
    settings: Mapping[str, SpeedSetting]
    temperatures: Sequence[float] = (0.0,)
    pairs: int = 9
    tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        require(1 <= self.pairs <= MAX_PAIRS, "pairs", self.pairs, f"in [1, {MAX_PAIRS}]")
        require(self.tokens >= 2, "tokens", self.tokens, "at least 2, to have a time per output token")
        require(len(self.temperatures) > 0, "temperature", self.temperatures, "one or more")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)

    def turns(self) -> Iterator[Turn]:
        """Yield the turns in the order in which they run: pass by pass."""
        for number in range(self.pairs):
            for prompts, temperature in product(self.prompts.values(), self.temperatures):
                yield Turn(number, prompts[number % len(prompts)], temperature, self.seed + number, self.tokens)

    def __len__(self) -> int:
        return self.pairs * len(self.prompts) * len(self.temperatures)


@dataclass(frozen=True)
class Turn:
    """One prompt to run under every setting."""

    number: int
    prompt: Prompt
    temperature: float
    seed: int
    tokens: int

    @property
    def key(self) -> TurnKey:
        """Return the key, which no second turn of a report has."""
        return self.prompt.kind, self.prompt.name, self.number, self.temperature

    def requests(self, setting: SpeedSetting) -> list[GenerateRequest]:
        """Return a request for each chat, the same under all settings but for speculation."""
        return [
            GenerateRequest(
                messages=chat,
                sampling=SamplingParams(temperature=self.temperature).with_defaults(),
                seed=self.seed,
                max_new_tokens=self.tokens,
                ignore_eos=not self.prompt.ends,
                acceptance=setting.acceptance,
                speculation=setting.speculation,
            )
            for chat in self.prompt.chats
        ]

    def same_text(self, setting: SpeedSetting) -> bool:
        """Return whether a setting promises target-only's tokens."""
        return setting.acceptance is Acceptance.COUPLED or self.temperature == 0


@dataclass(frozen=True)
class SpeedRun:
    """The figures of one setting: a generation, or several in a row.

    Attributes:
        wall_s: time at the client, prompts included.
        first_token_ms: time to the first token of each generation.
        decoded_tokens, decode_s: tokens and time after the first round of each generation.
        target_s: time of the target's own steps in the same rounds.
        draft_wait_ms: wait for drafts of all rounds together.
        accepted_histogram: rounds with a proposal, by how many of its tokens were accepted.
        feature_bytes: bytes of the target's hidden states that came for the drafter, prompts' included.
        promises_text: whether the text has to be target-only's.
        difference: place of the first token that is not target-only's; None: equal.
    """

    tokens: int
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
    draft_wait_ms: float
    accepted_histogram: tuple[int, ...] = ()
    feature_bytes: int = 0
    promises_text: bool = False
    difference: int | None = None

    @classmethod
    def of(cls, generations: Sequence[Generation], wall_s: float) -> SpeedRun:
        """Fold generations into the figures that reports are made of."""
        stats = [generation.stats for generation in generations]
        records = [record for each in stats for record in each.records]
        later = [record for each in stats for record in each.records[1:]]
        later_tokens = [
            max(0, each.committed - (each.records[0].accepted + 1 if each.records else 0)) for each in stats
        ]
        with_speed = [pair for pair in zip(later_tokens, stats, strict=True) if pair[1].tokens_per_second > 0]
        return cls(
            tokens=sum(len(generation.token_ids) for generation in generations),
            wall_s=wall_s,
            first_token_ms=tuple(each.time_to_first_token_ms for each in stats),
            decoded_tokens=sum(later_tokens),
            decode_s=sum(tokens / each.tokens_per_second for tokens, each in with_speed),
            target_s=sum(record.target.forward_ms + record.target.sample_ms for record in later) / 1e3,
            rounds=sum(each.rounds for each in stats),
            spec_rounds=sum(each.num_spec_steps for each in stats),
            proposed=sum(each.num_draft_tokens for each in stats),
            accepted=sum(each.num_accepted_draft_tokens for each in stats),
            cache_hits=sum(each.cache_hits for each in stats),
            draft_wait_ms=sum(record.draft_wait_ms for record in records),
            accepted_histogram=_histogram([record.accepted for record in records if record.proposed]),
            feature_bytes=sum(each.feature_bytes for each in stats),
        )

    @property
    def tokens_per_second(self) -> float:
        """Return the speed after the first round's tokens."""
        return self.decoded_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def free_tokens_per_second(self) -> float:
        """Return the speed if drafting and coordination had cost nothing; 0 where the steps' times are not known."""
        return self.decoded_tokens / self.target_s if self.target_s > 0 else 0.0


def _histogram(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values.count(value) for value in range(max(values, default=-1) + 1))


@dataclass(frozen=True)
class SpeedTurn:
    """A turn's runs by setting."""

    kind: str
    prompt: str
    number: int
    temperature: float
    seed: int
    runs: Mapping[str, SpeedRun]

    @property
    def key(self) -> TurnKey:
        """Return the key, as `Turn.key` does."""
        return self.kind, self.prompt, self.number, self.temperature

    @property
    def is_measured(self) -> bool:
        """Return whether every answer is long enough to have a speed after its first round."""
        return all(run.tokens_per_second > 0 for run in self.runs.values())

    def ratio(self, setting: str, over: str = PLAIN) -> float:
        """Return tokens per second of one setting ÷ another's."""
        return self.runs[setting].tokens_per_second / self.runs[over].tokens_per_second

    def as_json(self) -> dict[str, Any]:
        """Return the turn as JSON has it."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> SpeedTurn:
        """Read a turn from what `as_json` returned."""
        tuples = ("first_token_ms", "accepted_histogram")
        runs = {
            name: SpeedRun(**{**run, **{field: tuple(run[field]) for field in tuples}})
            for name, run in value["runs"].items()
        }
        return cls(**{**value, "runs": runs})


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or that one of them lacks; None: equal."""
    for index, (one_token, other_token) in enumerate(zip(one, other, strict=False)):
        if one_token != other_token:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def measure(
    runner: GenerationRunner, requests: Sequence[GenerateRequest], *, follows: bool = False
) -> tuple[SpeedRun, tuple[int, ...]]:
    """Run generations one after the other under the client's clock; return their figures and their tokens.

    Args:
        runner: the services that generate.
        requests: the chats.
        follows: each request goes on behind the ones before it and their answers.
    """
    start_s = time.perf_counter()
    generations: list[Generation] = []
    history: tuple[ChatMessage, ...] = ()
    for request in requests:
        messages = (*history, *request.messages)
        generations.append(runner.generate(replace(request, messages=messages)))
        history = (*messages, ChatMessage("assistant", generations[-1].text)) if follows else ()
    token_ids = tuple(token_id for generation in generations for token_id in generation.token_ids)
    return SpeedRun.of(generations, time.perf_counter() - start_s), token_ids


def run_turn(turn: Turn, settings: Mapping[str, SpeedSetting], groups: Mapping[str, GenerationRunner]) -> SpeedTurn:
    """Run one turn."""
    for group in dict.fromkeys(setting.group for setting in settings.values()):
        of_group = [setting for setting in settings.values() if setting.group == group]
        longest = max(of_group, key=lambda setting: setting.speculation.num_draft_tokens or 0)
        _generate(turn, longest, groups, PRIMING_TOKENS)
    order = list(settings)
    random.Random(f"{turn.key} {turn.seed}").shuffle(order)  # noqa: S311 - an order, no secret
    results = {
        name: measure(groups[settings[name].group], turn.requests(settings[name]), follows=turn.prompt.follows)
        for name in order
    }
    runs = {}
    for name, setting in settings.items():
        run, token_ids = results[name]
        promises_text = turn.same_text(setting)
        plain_token_ids = results[plain_beside(setting, settings)][1]
        difference = first_difference(plain_token_ids, token_ids) if promises_text else None
        runs[name] = replace(run, promises_text=promises_text, difference=difference)
    return SpeedTurn(*turn.key, seed=turn.seed, runs=runs)


def plain_beside(setting: SpeedSetting, settings: Mapping[str, SpeedSetting]) -> str:
    """Return target-only's name on the same services, whose floats are added in the same order, or on our fastest."""
    return next((name for name, one in settings.items() if one.is_off and one.group == setting.group), PLAIN)


def run_speed(
    plan: SpeedPlan,
    groups: Mapping[str, GenerationRunner],
    on_turn: Callable[[SpeedTurn], None],
    *,
    skip: Collection[TurnKey] = (),
    until: float = math.inf,
) -> None:
    """Run the plan, whole or to the end of the pass in which `until` comes, on the monotonic clock.

    Args:
        plan: the turns to measure.
        groups: the services of the settings.
        on_turn: called with each turn as it is done.
        skip: turns that have been measured before.
        until: time from which on no other pass begins.

    Raises:
        PacelineError: as the services sent it.
    """
    todo = [turn for turn in plan.turns() if turn.key not in skip]
    for turn in {turn.temperature: turn for turn in reversed(todo)}.values():
        for setting in plan.settings.values():
            _generate(turn, setting, groups, WARM_UP_TOKENS)
    number = todo[0].number if todo else 0
    for turn in todo:
        if turn.number != number and time.monotonic() > until:
            return
        number = turn.number
        on_turn(run_turn(turn, plan.settings, groups))


def _generate(turn: Turn, setting: SpeedSetting, groups: Mapping[str, GenerationRunner], tokens: int) -> None:
    """Run the turn's first chat, cut short."""
    measure(groups[setting.group], replace(turn, tokens=tokens).requests(setting)[:1])
