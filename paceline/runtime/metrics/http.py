"""What HTTP requests add to the metrics."""

from __future__ import annotations

from paceline.runtime.metrics import catalogue as names
from paceline.runtime.metrics.recorder import active


def http_request_done(route: str, status: int, seconds: float) -> None:
    """An HTTP request is answered; `route` is its template, never its path."""
    recorder = active()
    if recorder is not None:
        recorder.observe(names.HTTP_DURATION, seconds, route, str(status))
