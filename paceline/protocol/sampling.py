"""How a request asks to be sampled. Every object checks its own limits when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from paceline.protocol.errors import require
from paceline.protocol.given_files import json_value

MAX_TOP_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
REPETITION_PENALTIES = (0.01, 100.0)
MAX_PENALTY = 2.0
"""Largest presence and frequency penalty, of either sign, as in OpenAI's API."""
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_GRAMMAR_BYTES = 1 << 16
MAX_SAMPLES = 128
NOISE_VERSION = 1
"""Version of the noise that a seed stands for. A change of any number of `tests/vectors/noise.json` changes it."""


def check_top_logprobs(name: str, top: int | None) -> None:
    """Refuse a number of most probable tokens to report that is out of its range; None: no report."""
    require(top is None or 0 <= top <= MAX_TOP_LOGPROBS, name, top, f"in [0, {MAX_TOP_LOGPROBS}]")


class GrammarKind(Enum):
    """The notations that a grammar can be written in; the value is the field's name."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True)
class Grammar:
    """A formal language that the output must belong to; the target's library has the last word on its text."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        size = len(self.text.encode("utf-8", "surrogatepass"))
        in_range = 1 <= size <= MAX_GRAMMAR_BYTES
        require(in_range, f"{self.kind.value} bytes", size, f"in [1, {MAX_GRAMMAR_BYTES}]")
        if self.kind is GrammarKind.JSON_SCHEMA:
            self._check_json()

    def _check_json(self) -> None:
        schema = json_value(self.kind.value, self.text)
        require(isinstance(schema, dict), self.kind.value, self.text, "a JSON object")


class UnstatedNumber:
    """Marks a number that nobody stated: it counts as itself until a default of the model takes its place."""


class _UnstatedFloat(UnstatedNumber, float):
    pass


class _UnstatedInt(UnstatedNumber, int):
    pass


_ZERO, _ONE, _NO_K = _UnstatedFloat(0), _UnstatedFloat(1), _UnstatedInt(0)
FIELDS_WITH_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of `SamplingParams` for which a model may have defaults."""


@dataclass(frozen=True)
class SamplingParams:
    """The target's chain, applied in the order of `docs/sampling.md`.

    temperature 0 is greedy: a point mass on the largest logit, ties to the lowest id. `logit_bias` is
    kept as ascending (id, bias) pairs. Each of the `FIELDS_WITH_DEFAULTS` that is left out is an `UnstatedNumber`.
    In a request the model's defaults take its place. In a session every number is stated.
    """

    temperature: float = _ONE
    top_k: int = _NO_K
    top_p: float = _ONE
    min_p: float = _ZERO
    logprobs: int | None = None
    repetition_penalty: float = _ONE
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        temperature_ok = math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE
        require(temperature_ok, "temperature", self.temperature, f"in [0, {MAX_TEMPERATURE:g}]")
        require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 keeps all)")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        check_top_logprobs("logprobs", self.logprobs)
        self._check_penalties()
        self._check_logit_bias()
        self._check_bad_words()
        require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        # Behind a grammar's last token nothing but the end may come: both can't be kept.
        decides = self.grammar is None or self.min_tokens == 0
        require(decides, "min_tokens", self.min_tokens, "0 with a grammar, which decides where a text may end")

    def _check_penalties(self) -> None:
        low, high = REPETITION_PENALTIES
        # A float32 of the wire may be a hair outside the decimal limit.
        in_range = low * (1 - 1e-6) <= self.repetition_penalty <= high
        require(in_range, "repetition_penalty", self.repetition_penalty, f"in [{low:g}, {high:g}]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(abs(value) <= MAX_PENALTY, name, value, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")

    def _check_logit_bias(self) -> None:
        object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias)))
        entries = len(self.logit_bias)
        require(entries <= MAX_LOGIT_BIAS_ENTRIES, "logit_bias entries", entries, f"at most {MAX_LOGIT_BIAS_ENTRIES}")
        distinct = len({token_id for token_id, _ in self.logit_bias})
        require(distinct == entries, "logit_bias ids", entries, f"distinct ({distinct} are)")
        for token_id, bias in self.logit_bias:
            require(token_id >= 0, "logit_bias id", token_id, "at least 0")
            in_range = abs(bias) <= MAX_LOGIT_BIAS
            require(in_range, f"logit_bias of {token_id}", bias, f"in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]")

    def _check_bad_words(self) -> None:
        require(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", len(self.bad_words), f"at most {MAX_BAD_WORDS}")
        for word in self.bad_words:
            size_ok = 1 <= len(word) <= MAX_BAD_WORD_TOKENS
            require(size_ok, "bad_words tokens", len(word), f"1 to {MAX_BAD_WORD_TOKENS} of each")
            require(min(word) >= 0, "bad_words id", min(word), "at least 0")

    def with_defaults(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """A copy with every number stated: those left out are as in `defaults`, or the numbers that they count as."""
        open_fields = [name for name in FIELDS_WITH_DEFAULTS if isinstance(getattr(self, name), UnstatedNumber)]
        if not open_fields:
            return self
        numbers = {name: getattr(defaults or self, name) for name in open_fields}
        plain: dict[str, Any] = {name: (int if name == "top_k" else float)(n) for name, n in numbers.items()}
        return replace(self, **plain)

    @property
    def stated_numbers(self) -> dict[str, float]:
        """Those of `FIELDS_WITH_DEFAULTS` that are stated, by name, as decimals of float32."""
        numbers = {name: getattr(self, name) for name in FIELDS_WITH_DEFAULTS}
        return {name: _decimal(value) for name, value in numbers.items() if not isinstance(value, UnstatedNumber)}

    @property
    def numbers(self) -> SamplingParams:
        """The `FIELDS_WITH_DEFAULTS` alone; the other fields are as in `SamplingParams()`."""
        return SamplingParams(**{name: getattr(self, name) for name in FIELDS_WITH_DEFAULTS})

    @property
    def greedy(self) -> bool:
        """Whether the processed distribution is a point mass."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether logits change with the tokens that came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def forbids(self) -> bool:
        """Whether tokens are excluded before the filters look at the row."""
        return bool(self.bad_words) or self.min_tokens > 0 or self.grammar is not None

    @property
    def plain(self) -> bool:
        """Whether a row's distribution is a function of its logits alone, the same at every position."""
        return not (self.penalises or self.forbids or self.logit_bias)


def _decimal(number: float) -> float:
    """A number as people write it: 0.7, not the float32 next to it."""
    return number if isinstance(number, int) else float(f"{number:.7g}")


@dataclass(frozen=True)
class NoiseKey:
    """What fixes every draw of one session, apart from stream and position: the request's, or a draft's own."""

    seed: int
    sample_index: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.seed < 1 << 64, "seed", self.seed, "in [0, 2^64)")
        require(0 <= self.sample_index < 1 << 24, "sample_index", self.sample_index, "in [0, 2^24)")
