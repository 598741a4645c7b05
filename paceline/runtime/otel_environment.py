"""The standard `OTEL_*` variables of a signal: whether it is exported, how, and for which service.

An empty variable says nothing, as OpenTelemetry's specification has it.
"""

from __future__ import annotations

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
