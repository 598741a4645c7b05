"""The standard `OTEL_*` variables: whether a signal is exported, how, for which service, and which traces.

An empty variable says nothing, as OpenTelemetry's specification has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.protocol.errors import InvalidInput

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

_PROTOCOL = "grpc"


@dataclass(frozen=True)
class OtelSignal:
    """Traces or metrics.

    Attributes:
        name: as it stands in the variables' names.
        exporters: those that its variable may name, as the error for any other one lists them.
    """

    name: str
    exporters: str

    def is_exported(self, environment: Mapping[str, str]) -> bool:
        """Whether the environment asks for an export.

        Raises:
            InvalidInput: an exporter that is not supported.
        """
        exporter = environment.get(f"OTEL_{self.name}_EXPORTER", "")
        if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
            return False
        if exporter not in ("", "otlp"):
            raise InvalidInput.of(f"OTEL_{self.name}_EXPORTER", exporter, self.exporters)
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{self.name}_ENDPOINT")
        return exporter == "otlp" or any(environment.get(name) for name in endpoints)

    def check_protocol(self, environment: Mapping[str, str]) -> None:
        """Refuse what isn't OTLP's gRPC; the signal's own variable comes before the common one.

        Raises:
            InvalidInput: the protocol is another one.
        """
        names = (f"OTEL_EXPORTER_OTLP_{self.name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        name = next((name for name in names if environment.get(name)), None)
        if name is not None and environment[name] != _PROTOCOL:
            raise InvalidInput.of(name, environment[name], _PROTOCOL)


TRACES = OtelSignal("TRACES", "otlp or none")
METRICS = OtelSignal("METRICS", "otlp or none; metrics_port is for Prometheus")


def resource_of(service_name: str, environment: Mapping[str, str]) -> Resource:
    """The SDK's description of this process; `OTEL_SERVICE_NAME` comes before the service's own name."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    return Resource.create({} if environment.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service_name})


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
