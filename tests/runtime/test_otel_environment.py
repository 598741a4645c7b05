"""What the standard variables say of each signal."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from paceline.protocol.errors import InvalidInput
from paceline.runtime.otel_environment import METRICS, TRACES, OtelSignal, resource_of

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
both = pytest.mark.parametrize("signal", [TRACES, METRICS], ids=lambda signal: str(signal.name))


@both
@pytest.mark.parametrize(
    ("environment", "exported"),
    [
        ({}, False),
        (ENDPOINT, True),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_an_endpoint_asks_for_both(signal: OtelSignal, environment: Mapping[str, str], exported: bool) -> None:
    assert signal.is_exported(environment) is exported


@both
def test_a_signal_s_own_variables_are_its_own(signal: OtelSignal) -> None:
    other = METRICS if signal is TRACES else TRACES
    for own in ({f"OTEL_{signal.name}_EXPORTER": "otlp"}, {f"OTEL_EXPORTER_OTLP_{signal.name}_ENDPOINT": "x:1"}):
        assert signal.is_exported(own)
        assert not other.is_exported(own)
    off = ENDPOINT | {f"OTEL_{signal.name}_EXPORTER": "none"}
    assert not signal.is_exported(off)
    assert other.is_exported(off)


@both
def test_what_is_not_supported_is_refused_by_name(signal: OtelSignal) -> None:
    exporter = f"OTEL_{signal.name}_EXPORTER"
    with pytest.raises(InvalidInput, match=f"{exporter} = 'console': must be {signal.exporters}"):
        signal.is_exported({exporter: "console"})
    for name in (f"OTEL_EXPORTER_OTLP_{signal.name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        signal.check_protocol({name: "grpc"})
        with pytest.raises(InvalidInput, match=f"{name} = 'http/json': must be grpc"):
            signal.check_protocol({name: "http/json"})


@both
def test_a_signal_s_own_protocol_comes_first_and_an_empty_one_says_nothing(signal: OtelSignal) -> None:
    own, common = f"OTEL_EXPORTER_OTLP_{signal.name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    signal.check_protocol({own: "grpc", common: "http/protobuf"})
    signal.check_protocol({own: "", common: ""})
    for environment in ({own: "http/protobuf", common: "grpc"}, {own: "", common: "http/protobuf"}):
        with pytest.raises(InvalidInput, match="= 'http/protobuf': must be grpc"):
            signal.check_protocol(environment)


def test_the_environment_s_name_of_a_service_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    assert resource_of("paceline-draft", {}).attributes["service.name"] == "paceline-draft"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")  # the SDK reads it itself
    assert resource_of("paceline-draft", {"OTEL_SERVICE_NAME": "mine"}).attributes["service.name"] == "mine"
