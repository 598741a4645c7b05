"""The requests of a simulated cluster: when they come, how long they are, and how the draft does in them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from paceline.protocol.errors import InvalidInput, require
from paceline_lab.simulate.scenario import Lengths, Traffic
from paceline_lab.simulate.specs import Z99
from paceline_lab.simulate.synthetic import SyntheticPair, synthetic_requests
from paceline_lab.simulate.trace import MAX_ID, TracedRequest, read_trace

TEXTS = 48
"""Synthetic texts that requests are cut from, each with an ease of its own."""
TEXT_TOKENS = 2048
PREFIXES, PREFIX_BITS = MAX_ID >> 1, 20
"""The ids of shared prefixes, so many bits for each, stand behind those of texts."""
BLOCK = 1024
"""Random numbers that are drawn at once."""


@cache
def _synthetic(pair: SyntheticPair, tokens: int, seed: int) -> tuple[TracedRequest, ...]:
    return synthetic_requests(pair, TEXTS, tokens, seed=seed)


class TrafficSource:
    """One kind of traffic, drawn as it is asked for; `text_seed`: of the texts that all cells take pieces of."""

    def __init__(self, traffic: Traffic, group: int, seed: int, text_seed: int) -> None:
        self._traffic, self._group = traffic, group
        self._random = np.random.default_rng((seed, group))
        self._next_id = 0
        most = traffic.answer_tokens.most
        self._texts = (
            read_trace(traffic.trace).requests
            if traffic.trace is not None
            else _synthetic(traffic.synthetic, max(TEXT_TOKENS, most), text_seed)
        )
        self._prompts, self._answers = self._lengths(traffic.prompt_tokens), self._lengths(traffic.answer_tokens)

    def arrivals_ms(self) -> Iterator[float]:
        """When requests come; without end where they come at a rate."""
        traffic = self._traffic
        if traffic.sessions:
            # Spread over a second: requests that came at once would stay in step.
            yield from sorted(float(at) for at in self._random.random(traffic.sessions) * 1e3)
        elif traffic.arrivals is not None:
            yield from read_arrivals(traffic.arrivals)
        else:
            at = 0.0
            while True:
                for gap in self._random.exponential(1e3 / traffic.requests_per_second, BLOCK).tolist():
                    at += gap
                    yield at

    def request(self, at_ms: float) -> TracedRequest:
        """One that comes now. No two have a token alike, but for the prefixes that prompts share."""
        traffic, random = self._traffic, self._random
        tokens = next(self._answers)
        prompt_tokens = max(next(self._prompts), traffic.prefix_tokens + 1)
        prefix: tuple[int, ...] = ()
        if traffic.prefix_tokens:
            first = PREFIXES + (int(random.integers(traffic.prefixes)) << PREFIX_BITS)
            prefix = tuple(range(first, first + traffic.prefix_tokens))
        answer, ranks, chances = self._cut(tokens)
        own_tokens = prompt_tokens - len(prefix)
        prompt = (*prefix, *range(self._next_id, self._next_id + own_tokens))
        ids: dict[int, int] = {}
        answer = tuple(ids.setdefault(each, self._next_id + own_tokens + len(ids)) for each in answer)
        self._next_id = (self._next_id + own_tokens + len(ids)) % PREFIXES
        return TracedRequest(prompt, answer, ranks, chances, at_ms, tenant=traffic.tenant, group=self._group)

    def _cut(self, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        """A piece of a text; one that is too short is repeated."""
        text = self._texts[int(self._random.integers(len(self._texts)))]
        first = int(self._random.integers(max(1, text.tokens - tokens + 1)))
        times = math.ceil(tokens / text.tokens)
        last = first + tokens
        return (text.answer * times)[first:last], (text.ranks * times)[first:last], (text.chances * times)[first:last]

    def _lengths(self, lengths: Lengths) -> Iterator[int]:
        while lengths.p99 <= lengths.median:
            yield lengths.median
        sigma = math.log(lengths.p99 / lengths.median) / Z99
        while True:
            drawn = self._random.lognormal(math.log(lengths.median), sigma, BLOCK)
            yield from np.clip(np.rint(drawn), 1, lengths.most).astype(int).tolist()


def read_arrivals(file: Path) -> list[float]:
    """Milliseconds of a file of seconds, one arrival a line, in order.

    Raises:
        InvalidInput: it can't be read, or a line is no number, or earlier than the one before.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput.of("arrivals", str(file), f"a file that can be read ({error})") from error
    times, before = [], 0.0
    for number, line in enumerate(lines, 1):
        try:
            seconds = float(line)
        except ValueError as error:
            raise InvalidInput.of(f"arrivals line {number}", line, "a number of seconds") from error
        require(seconds >= before, f"arrivals line {number}", seconds, f"at least {before:g}, as the line before")
        before = seconds
        times.append(1e3 * seconds)
    require(bool(times), "arrivals", str(file), "one line or more")
    return times
