"""Which traces are sampled when they begin: the standard `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.protocol.errors import InvalidInput

_RATIO = "traceidratio"
_RATIOS = {"always_on": 1.0, "always_off": 0.0, _RATIO: None}
_OF_PARENT = "parentbased_"
_RANDOM_BITS = 64
"""Bits of a trace id's right half, all of which are random in every version of W3C Trace Context."""


@dataclass(frozen=True)
class Sampler:
    """Samples a share of the traces, the same ones in every process that asks.

    Attributes:
        ratio: the share.
        follows: whether a span is sampled as its parent is, where it has one.
    """

    ratio: float = 1.0
    follows: bool = True

    def samples(self, trace_id: str, parent_sampled: bool | None) -> bool:
        """Whether a span is sampled; `parent_sampled` is None for one that has no parent."""
        if self.follows and parent_sampled is not None:
            return parent_sampled
        return int(trace_id[-_RANDOM_BITS // 4 :], 16) < self.ratio * float(1 << _RANDOM_BITS)


def sampler_from(environment: Mapping[str, str]) -> Sampler:
    """The sampler that the environment names; all traces, unless a parent says otherwise, where it names none.

    Raises:
        InvalidInput: there is no such sampler, or the ratio is no number in [0, 1].
    """
    name = environment.get("OTEL_TRACES_SAMPLER") or f"{_OF_PARENT}always_on"
    kind = name.removeprefix(_OF_PARENT)
    if kind not in _RATIOS:
        samplers = [f"{before}{each}" for before in ("", _OF_PARENT) for each in _RATIOS]
        raise InvalidInput.of("OTEL_TRACES_SAMPLER", name, f"one of {', '.join(samplers)}")
    ratio = _RATIOS[kind]
    if ratio is None:
        ratio = _ratio(environment.get("OTEL_TRACES_SAMPLER_ARG") or "1")
    return Sampler(ratio, follows=name != kind)


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not 0 <= ratio <= 1:
        raise InvalidInput.of("OTEL_TRACES_SAMPLER_ARG", text, "a number in [0, 1]")
    return ratio
