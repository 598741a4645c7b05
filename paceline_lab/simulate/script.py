"""Texts that are written already, and engines that follow them: a target that says them, a draft that guesses.

A row's state is where its path stands: in a prompt, at a place of a text, or off it. So a wrong rollback or crossed
sessions give wrong tokens, as they would with a model, and no row of logits is computed. Decoding is greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engine.interface import (
    Draw,
    Drawing,
    DrawnTokens,
    EngineInfo,
    Logits,
    RankedRows,
    RankedTokens,
    Ranking,
    StepItem,
    StepPlan,
)
from paceline.engine.paths import PathEngine
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.handshake import Fingerprint
from paceline.runtime.config import EngineSettings
from paceline_lab.simulate.trace import MAX_ID

MARKS = MAX_ID
"""The first of the ids that end prompts: each request's own, so that two of one prompt are told apart."""
WRONG_TOKENS = tuple(range(2 * MAX_ID, 2 * MAX_ID + 64))
"""Ids that no text has: what a draft proposes where it is wrong."""
LEAST_CHANCE = 1e-6
"""Of a token that is proposed: none is impossible."""
VOCABULARY = WRONG_TOKENS[-1] + 1
_MODULUS = (1 << 61) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15 % _MODULUS


@dataclass(frozen=True)
class Script:
    """An answer, and what the draft makes of each of its tokens, as `paceline_lab.simulate.trace` says it."""

    answer: tuple[int, ...]
    ranks: tuple[int, ...]
    chances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _InPrompt:
    digest: int = 1


@dataclass(frozen=True, slots=True)
class _At:
    """Before the token at a place of a script; `is_on`: all before it are the script's own."""

    script: Script
    place: int
    is_on: bool


_State = _InPrompt | _At
PassTime = Callable[[StepPlan], None]
"""Takes the time of a step; called on the thread that runs it."""


class Scripts:
    """The scripts of a run, by their prompts."""

    def __init__(self) -> None:
        self._scripts: dict[int, Script] = {}

    def add(self, prompt: Sequence[int], script: Script) -> None:
        """Say what follows a prompt."""
        self._scripts[_digest(prompt)] = script

    def forget(self, prompt: Sequence[int]) -> None:
        """Drop what follows a prompt."""
        del self._scripts[_digest(prompt)]

    def follow(self, state: _State, token: int) -> _State:
        """Return the state behind one token more."""
        if isinstance(state, _At):
            goes_on = state.is_on and state.place < len(state.script.answer)
            return _At(state.script, state.place + 1, goes_on and state.script.answer[state.place] == token)
        digest = _mix(state.digest, token)
        script = self._scripts.get(digest)
        return _InPrompt(digest) if script is None else _At(script, 0, is_on=True)

    def next_token(self, state: _State) -> int:
        """Return the target's own token; off the text, and behind it, one that no text has."""
        if isinstance(state, _At) and state.is_on and state.place < len(state.script.answer):
            return state.script.answer[state.place]
        return WRONG_TOKENS[-1]

    def guesses(self, state: _State, count: int) -> RankedTokens:
        """Return the draft's best tokens: the text's own at its rank, and wrong ones before and behind it.

        Off the text the draft is as sure as it is at the same place of it.
        """
        ids = [*WRONG_TOKENS[:count]]
        chance = 0.5
        if isinstance(state, _At):
            place = min(state.place, len(state.script.answer) - 1)
            chance, rank = state.script.chances[place], state.script.ranks[place]
            if state.is_on and 1 <= rank <= count and state.place == place:
                ids[rank - 1] = state.script.answer[place]
        rest = [(1 - chance) / 2 ** (k + 1) for k in range(len(ids) - 1)]
        return RankedTokens(tuple(ids), tuple(max(each, LEAST_CHANCE) for each in (chance, *rest)))


@dataclass(frozen=True)
class _Drawn:
    tokens: tuple[int, ...]

    def drawn_tokens(self) -> DrawnTokens:
        return DrawnTokens(self.tokens)


@dataclass(frozen=True)
class _Ranked:
    rows: tuple[RankedTokens, ...]

    def ranked_tokens(self) -> tuple[RankedTokens, ...]:
        return self.rows


class ScriptedEngine(PathEngine[_State]):
    """Follows scripts; `Engine`, `DrawingEngine` and `RankingEngine` say what its methods promise.

    Args:
        kv_rows: KV budget in rows.
        pass_time: takes a step's time.
    """

    def __init__(
        self, scripts: Scripts, settings: EngineSettings, pass_time: PassTime, *, max_length: int, kv_rows: int
    ) -> None:
        fingerprint = Fingerprint("script", NumberTokenizer.fingerprint, VOCABULARY, "script")
        super().__init__(EngineInfo(fingerprint, max_length, kv_rows), settings)
        self._scripts = scripts
        self._pass_time = pass_time
        self._paths: dict[int, list[_State]] = {}

    def step(self, plan: StepPlan) -> Sequence[Logits]:  # noqa: D102
        self._run(plan)
        return [*map(self._no_logits, plan.items)]

    def step_and_draw(self, plan: StepPlan, draws: Sequence[Draw | None]) -> Sequence[Logits | Drawing]:  # noqa: D102
        self._run(plan)
        rounds, chunks = plan.items[: len(draws)], plan.items[len(draws) :]
        drawn = [_Drawn(tuple(map(self._scripts.next_token, self._logit_states(item)))) for item in rounds]
        return [*drawn, *map(self._no_logits, chunks)]

    def step_and_rank(self, plan: StepPlan, rankings: Sequence[Ranking | None]) -> Sequence[Logits | RankedRows]:  # noqa: D102
        self._run(plan)
        return [
            _Ranked(tuple(self._scripts.guesses(state, ranking.count if ranking else 1) for state in states))
            for ranking, states in zip(rankings, map(self._logit_states, plan.items), strict=True)
        ]

    def _run(self, plan: StepPlan) -> None:
        self._extend_paths(plan)
        self._pass_time(plan)

    def _next_state(self, state: _State | None, token: int) -> _State:
        return self._scripts.follow(state or _InPrompt(), token)

    def _no_logits(self, item: StepItem) -> Logits:
        return np.zeros((len(item.logit_rows), self.info.fingerprint.vocab_size), np.float32)


class NumberTokenizer(TableTokenizer):
    """The vocabulary of scripts; each id is written as one character."""

    fingerprint = "numbers"

    def __init__(self) -> None:
        super().__init__(2, None)
        self.vocab_size = VOCABULARY
        self.fingerprint = NumberTokenizer.fingerprint

    def decode(self, ids: Sequence[int]) -> str:
        """As `Tokenizer`."""
        return "x" * len(ids)

    def text_bytes(self, token_id: int) -> bytes:
        """As `Tokenizer`."""
        return b"x"

    @property
    def hidden_tokens(self) -> Mapping[int, str]:
        """As `Tokenizer`."""
        return {}


def _digest(prompt: Sequence[int]) -> int:
    digest = _InPrompt().digest
    for token in prompt:
        digest = _mix(digest, token)
    return digest


def _mix(digest: int, token: int) -> int:
    return (digest * _MULTIPLIER + token + 1) % _MODULUS
