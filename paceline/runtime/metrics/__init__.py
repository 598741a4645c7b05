"""OpenTelemetry metrics of every service, over OTLP and for Prometheus; off, and at no cost, unless asked for."""

from paceline.runtime.metrics.exporters import configure, exposition, is_on, shutdown
from paceline.runtime.metrics.requests import (
    RequestMeter,
    features_came,
    fell_back,
    http_request_done,
    prefix_admitted,
    proposal_sent,
    reload_failed,
    round_done,
    session_failed,
    session_refused,
    shadow_sent,
    step_done,
    watch_grammars,
    watch_groups,
    watch_service,
)

__all__ = [
    "RequestMeter",
    "configure",
    "exposition",
    "features_came",
    "fell_back",
    "http_request_done",
    "is_on",
    "prefix_admitted",
    "proposal_sent",
    "reload_failed",
    "round_done",
    "session_failed",
    "session_refused",
    "shadow_sent",
    "shutdown",
    "step_done",
    "watch_grammars",
    "watch_groups",
    "watch_service",
]
