"""Who reads the metrics: Prometheus, over HTTP or as text, and an OTLP receiver.

Off unless a port or an exposition is asked for, or the standard `OTEL_*` variables name an OTLP receiver. While off,
neither opentelemetry nor prometheus_client is imported.

The metrics that tools for vLLM ask for, under its names.

They are made from ours when they are read, so nothing is counted twice.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.runtime.config import ServerSettings
from paceline.runtime.metrics import catalogue as names
from paceline.runtime.metrics import recorder as recording
from paceline.runtime.metrics.catalogue import CATALOGUE, DRAFT, GATEWAY, MetricKind, MetricSpec, of_service
from paceline.runtime.metrics.recorder import MetricRecorder
from paceline.runtime.metrics.requests import watch_requests
from paceline.runtime.otel_environment import METRICS, resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.samples import Sample

logger = logging.getLogger(__name__)

PREFIX = "vllm:"
ENGINE = "0"


@dataclass(frozen=True)
class VllmName:
    """A metric of vLLM's: the sum of `sources` by the labels `by`, of the series whose labels match `only`."""

    name: str
    meaning: str
    sources: tuple[MetricSpec, ...]
    only: Mapping[str, str] = field(default_factory=dict)
    by: tuple[str, ...] = ()

    @property
    def kind(self) -> MetricKind:
        """The kind of its sources."""
        return self.sources[0].kind

    @property
    def exposed_name(self) -> str:
        """The name that Prometheus reads."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is MetricKind.COUNTER else ''}"


_ACTIVE = (names.REQUESTS_ACTIVE, names.SESSIONS)
VLLM_NAMES = (
    VllmName("spec_decode_num_drafts", "Rounds with a proposal.", (names.ROUNDS_PROPOSED,)),
    VllmName("spec_decode_num_draft_tokens", "Proposed tokens.", (names.TOKENS_PROPOSED,)),
    VllmName("spec_decode_num_accepted_tokens", "Accepted tokens.", (names.TOKENS_ACCEPTED,)),
    VllmName("spec_decode_num_accepted_tokens_per_pos", "By position.", (names.TOKENS_ACCEPTED,), by=("position",)),
    VllmName("num_requests_running", "Requests that get tokens.", _ACTIVE, {"state": "running"}),
    VllmName("num_requests_waiting", "Requests that wait.", _ACTIVE, {"state": "waiting"}),
    VllmName("kv_cache_usage_perc", "Share of KV rows in use, 0 to 1.", (names.KV_USAGE,)),
    VllmName("time_to_first_token_seconds", "From arrival to the first token.", (names.FIRST_TOKEN,)),
    VllmName("inter_token_latency_seconds", "Between the tokens of one round and the next.", (names.ROUND_DURATION,)),
    VllmName("request_time_per_output_token_seconds", "Mean of a request.", (names.TOKEN_DURATION,)),
    VllmName("e2e_request_latency_seconds", "From arrival to end.", (names.REQUEST_DURATION,)),
)
SOURCES = frozenset(source for each in VLLM_NAMES for source in each.sources)


def aliases(families: Iterable[Metric], model: str) -> Iterator[Metric]:
    """Those of vLLM's metrics whose sources are among `families`, which are ours."""
    by_name = {family.name: family for family in families}
    for each in VLLM_NAMES:
        sources = [
            by_name[name] for spec in each.sources if (name := spec.exposed_name.removesuffix("_total")) in by_name
        ]
        if sources:
            yield _alias(each, sources, model)


def _alias(vllm_name: VllmName, sources: Iterable[Metric], model: str) -> Metric:
    from prometheus_client.core import Metric

    alias = Metric(f"{PREFIX}{vllm_name.name}", vllm_name.meaning, str(vllm_name.kind))
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    if vllm_name.kind is not MetricKind.HISTOGRAM and not vllm_name.by:
        sums["_total" if vllm_name.kind is MetricKind.COUNTER else "", ()] = 0
    for source in sources:
        for sample in source.samples:
            if vllm_name.only.items() <= sample.labels.items():
                sums[sample.name.removeprefix(source.name), _labels_of(sample, vllm_name.by)] += sample.value
    for (suffix, own_labels), value in sums.items():
        labels = {"model_name": model, "engine": ENGINE, **dict(own_labels)}
        alias.add_sample(f"{alias.name}{suffix}", labels, value)
    return alias


def _labels_of(sample: Sample, label_names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((label, value) for label, value in sample.labels.items() if label in (*label_names, "le"))


NAMESPACE = "paceline-"
DEFAULTS = ServerSettings()
SHUTDOWN_MS = 5_000
"""Longest time that a receiver which does not answer may delay the end of a service."""
_exporting: _Exporting | None = None


def configure(
    service_name: str, settings: ServerSettings = DEFAULTS, *, model: str = "", prometheus: bool = False
) -> bool:
    """Switch metrics on if somebody is to read them; returns whether they are on.

    Args:
        service_name: `service.name`, unless `OTEL_SERVICE_NAME` is set; behind `paceline-` the catalogue's service.
        settings: `host` and `metrics_port`, where Prometheus asks; `vllm_metrics`.
        model: the name of the served model.
        prometheus: whether somebody will ask for `exposition`.

    Raises:
        Unsupported: they are asked for and the extra `otel` isn't installed.
        InvalidInput: the port is taken, or an exporter or protocol that is not supported.
    """
    global _exporting
    otlp = METRICS.is_exported(os.environ)
    shutdown()
    prometheus = prometheus or settings.metrics_port is not None
    if not prometheus and not otlp:
        return False
    try:
        _exporting = _Exporting(service_name, settings, model, otlp=otlp, prometheus=prometheus)
    except ImportError as error:
        raise Unsupported("metrics need opentelemetry and prometheus_client: pip install 'paceline[otel]'") from error
    recording.activate(_exporting.recorder)
    watch_requests()
    return True


def is_on() -> bool:
    """Whether anything is recorded."""
    return _exporting is not None


def exposition() -> tuple[bytes, str]:
    """The present metrics in Prometheus's format, and its content type; empty unless `configure` was asked for it."""
    if _exporting is None:
        return b"", "text/plain; version=0.0.4; charset=utf-8"
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return generate_latest(_exporting.registry), CONTENT_TYPE_LATEST


def shutdown() -> None:
    """Export what is pending and switch metrics off. Blocks until the exporter has finished."""
    global _exporting
    exporting, _exporting = _exporting, None
    recording.activate(None)
    if exporting is not None:
        exporting.close()


class _Exporting:
    """The SDK, imported on construction."""

    def __init__(
        self, service_name: str, settings: ServerSettings, model: str, *, otlp: bool, prometheus: bool
    ) -> None:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
        from prometheus_client import CollectorRegistry

        service = service_name.removeprefix(NAMESPACE)
        own = CollectorRegistry()
        readers: list[MetricReader] = [_otlp_reader()] if otlp else []
        if prometheus:
            readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=own))
        self._provider = MeterProvider(readers, resource_of(service_name, os.environ), AlwaysOffExemplarFilter())
        specs = of_service(service)
        vllm = settings.vllm_metrics and service != DRAFT
        specs_and_sources = {*specs, *SOURCES} if vllm and service == GATEWAY else {*specs}
        instruments = [spec for spec in CATALOGUE if spec in specs_and_sources]
        self.recorder = MetricRecorder(self._provider.get_meter("paceline"), instruments, service, model)
        hidden = frozenset(spec.exposed_name.removesuffix("_total") for spec in instruments if spec not in specs)
        self.registry = CollectorRegistry()
        self.registry.register(_Exposition(own, hidden, model if vllm else None))
        self._server = None if settings.metrics_port is None else _serve(settings, self.registry)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._provider.shutdown(SHUTDOWN_MS)


class _Exposition:
    """A service's own metrics, and vLLM's names for them if they are asked for.

    Args:
        own: the metrics that the SDK exposes.
        hidden: names of metrics that are there for vLLM's names only.
        model: the value of vLLM's label; None: without vLLM's names.
    """

    def __init__(self, own: CollectorRegistry, hidden: frozenset[str], model: str | None) -> None:
        self._own = own
        self._hidden = hidden
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's own name for it; called by the thread of whoever asks."""
        families = [*self._own.collect()]
        yield from (family for family in families if family.name not in self._hidden)
        if self._model is not None:
            yield from aliases(families, self._model)


def _serve(settings: ServerSettings, registry: CollectorRegistry) -> Any:
    from prometheus_client import start_http_server

    assert settings.metrics_port is not None
    try:
        server, _ = start_http_server(settings.metrics_port, settings.host, registry)
    except OSError as error:
        address = f"{settings.host}:{settings.metrics_port}"
        raise InvalidInput.of("server.metrics_port", address, "a free port of this machine") from error
    logger.info("metrics: path=/metrics host=%s port=%d", settings.host, server.server_port)
    return server


def _otlp_reader() -> MetricReader:
    METRICS.check_protocol(os.environ)
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter())
