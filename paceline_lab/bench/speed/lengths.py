"""`paceline bench speed --k --alone`: `auto` beside fixed settings, on the same services, in one run.

A fixed setting is a constant number of proposed tokens, or one of the services' drafters alone.

A turn is one prompt at one temperature with one seed under every setting. Target-only runs twice, so that each turn
has its own noise. The order is drawn anew for each turn: what the machine does meanwhile meets every setting alike.
A short generation before each turn brings the prompt into the services' caches, which the settings share; else the
first of them alone would pay for it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.local.drafter_choice import DrafterChoice
from paceline.protocol.errors import require
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.proposal import AUTO, MODEL, NGRAM, NONE
from paceline_lab.bench.speed.groups import WARM_UP_TOKENS, GenerationRunner
from paceline_lab.bench.speed.run import SpeedPlan, SpeedRun, Turn, first_difference, measure

PLAIN = "target-only"
OFF = "k=0"
"""Target-only once more."""
PRIMING_TOKENS = 2

TurnKey = tuple[str, str, int, float]
"""Kind, prompt, pass and temperature."""


@dataclass(frozen=True)
class LengthRun:
    """One setting's run of a turn.

    Attributes:
        tokens: new tokens.
        tokens_per_second: after the first round of each generation.
        target_s: the target's own steps in the same rounds.
        wall_s: the whole request, at the client.
        difference: index of the first token that is not target-only's; None: equal, or not promised to be.
        accepted_histogram, feature_bytes: as `SpeedRun` has them.
    """

    tokens: int
    decoded_tokens: int
    tokens_per_second: float
    target_s: float
    wall_s: float
    rounds: int
    proposed: int
    accepted: int
    difference: int | None = None
    accepted_histogram: tuple[int, ...] = ()
    feature_bytes: int = 0

    @classmethod
    def of(cls, run: SpeedRun, difference: int | None) -> LengthRun:
        """Keep what the report is made of."""
        return cls(
            tokens=len(run.token_ids),
            decoded_tokens=run.decoded_tokens,
            tokens_per_second=run.tokens_per_second,
            target_s=run.target_s,
            wall_s=run.wall_s,
            rounds=run.rounds,
            proposed=run.proposed,
            accepted=run.accepted,
            difference=difference,
            accepted_histogram=run.accepted_histogram,
            feature_bytes=run.feature_bytes,
        )

    @property
    def free_tokens_per_second(self) -> float:
        """Its speed if drafting and coordination had cost nothing."""
        return self.decoded_tokens / self.target_s if self.target_s > 0 else 0.0


@dataclass(frozen=True)
class LengthsTurn:
    """A turn's runs by setting: `target-only`, `k=0`, `k=1` …, drafters alone, `auto`."""

    kind: str
    prompt: str
    number: int
    temperature: float
    seed: int
    runs: Mapping[str, LengthRun]

    @property
    def key(self) -> TurnKey:
        """What no second turn of a report has."""
        return self.kind, self.prompt, self.number, self.temperature

    @property
    def is_measured(self) -> bool:
        """Whether every answer is long enough to have a speed after its first round."""
        return all(run.tokens_per_second > 0 for run in self.runs.values())

    def ratio(self, setting: str, over: str = PLAIN) -> float:
        """Tokens per second of one setting ÷ another's."""
        return self.runs[setting].tokens_per_second / self.runs[over].tokens_per_second

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> LengthsTurn:
        """What `as_json` gave."""
        runs = {name: LengthRun(**run) for name, run in value["runs"].items()}
        return cls(**{**value, "runs": runs})


def check_lengths(plan: SpeedPlan, lengths: Sequence[int], alone: Sequence[str]) -> None:
    """Refuse what can't be compared.

    Raises:
        InvalidInput: nothing to compare with, bad lengths, or not one drafter.
    """
    require(len(lengths) + len(alone) > 0, "k", lengths, "one number or more")
    for length in lengths:
        SpeculationSettings(num_draft_tokens=length)
    drafters = [variant.drafter for variant in plan.variants]
    comparable = len(drafters) == 1 and drafters[0] != NONE
    require(comparable, "drafter", ",".join(drafters), "one drafter with --k, under one rule, and not none")
    chosen = plan.variants[0].num_draft_tokens
    require(chosen is None, "num_draft_tokens", chosen, "auto with --k, which gives the numbers")


def drafters_of(drafter: str, model: str) -> tuple[str, ...]:
    """What services started for `--drafter` offer, as requests name it."""
    choice = DrafterChoice.parse(drafter)
    first, *others = choice.draft_models(model) or ("",)
    drafts = (MODEL, *(f"{MODEL}:{name}" for name in others)) if first else ()
    return (NGRAM, *drafts) if choice.kind == AUTO else drafts


def settings_of(plan: SpeedPlan, lengths: Sequence[int], alone: Sequence[str]) -> dict[str, SpeculationSettings]:
    """What a turn's requests ask for, by name; a drafter alone is called by the end of its path, with each k, too."""
    auto = plan.variants[0].speculation
    off = SpeculationSettings(off=True)
    constant = {f"k={length}": replace(auto, num_draft_tokens=length) for length in lengths if length}
    single = {drafter.rstrip("/").rpartition("/")[2]: replace(auto, drafter=drafter) for drafter in alone}
    lengthened = {
        f"{name} {k}": replace(setting, num_draft_tokens=asked.num_draft_tokens)
        for name, setting in single.items()
        for k, asked in constant.items()
    }
    return {PLAIN: off, OFF: off, **constant, **single, **lengthened, AUTO: auto}


def run_lengths(
    plan: SpeedPlan,
    settings: Mapping[str, SpeculationSettings],
    runner: GenerationRunner,
    on_turn: Callable[[LengthsTurn], None],
    *,
    skip: Collection[TurnKey] = (),
    until: float = math.inf,
) -> None:
    """Run the plan's turns, whole or to the end of the pass in which `until` comes, on the monotonic clock.

    Args:
        plan: with one variant.
        settings: as `settings_of` gives them.
        runner: services that all settings share.
        on_turn: sees each turn as it is done.
        skip: turns that have been measured before.
        until: when to begin no other pass.

    Raises:
        PacelineError: as the services sent it.
    """
    todo = [turn for turn in plan.turns() if _key(turn) not in skip]
    for turn in {turn.temperature: turn for turn in reversed(todo)}.values():
        for setting in settings.values():
            _generate(turn, setting, runner, WARM_UP_TOKENS)
    number = todo[0].number if todo else 0
    for turn in todo:
        if turn.number != number and time.monotonic() > until:
            return
        number = turn.number
        on_turn(_run_turn(turn, settings, runner))


def _run_turn(turn: Turn, settings: Mapping[str, SpeculationSettings], runner: GenerationRunner) -> LengthsTurn:
    longest = max(settings.values(), key=lambda setting: setting.num_draft_tokens or 0)
    _generate(turn, longest, runner, PRIMING_TOKENS)
    order = list(settings)
    random.Random(f"{_key(turn)} {turn.seed}").shuffle(order)  # noqa: S311 - an order, no secret
    runs = {name: measure(runner, turn.requests(settings[name]), follows=turn.prompt.follows) for name in order}
    plain = runs[PLAIN].token_ids
    return LengthsTurn(
        *_key(turn),
        seed=turn.seed,
        runs={
            name: LengthRun.of(runs[name], first_difference(plain, runs[name].token_ids) if turn.same_text else None)
            for name in settings
        },
    )


def _key(turn: Turn) -> TurnKey:
    return turn.prompt.kind, turn.prompt.name, turn.number, turn.temperature


def _generate(turn: Turn, setting: SpeculationSettings, runner: GenerationRunner, tokens: int) -> None:
    """The turn's first chat, cut short."""
    measure(runner, replace(turn, tokens=tokens).requests(setting)[:1])
