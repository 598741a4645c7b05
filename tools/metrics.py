"""The reference of all metrics: `python -m tools.metrics` writes docs/metrics.md, `--check` compares it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.runtime.metrics.catalogue import CATALOGUE, MetricLabel, MetricSpec
from paceline.runtime.metrics.exporters import VLLM_NAMES, VllmName

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
MOST_SHOWN = 6
INTRODUCTION = """\
# Metrics

<!-- Made by `python -m tools.metrics` from paceline/runtime/metrics/catalogue.py; `make check` compares. -->

Every service tells Prometheus at `/metrics` of its `metrics_port`, a plaintext HTTP port that is off unless it is
set, and an OTLP receiver where `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_METRICS_EXPORTER=otlp` names one. Both need the
extra `otel`. `paceline serve --metrics-port 9464` opens the coordinator's at 9464, the draft service's at 9465, the
target's at 9466. OTLP has the same metrics with dots in their names, and units beside them instead of in them.

[deploy/otel](../deploy/otel/README.md) has a dashboard, alerts and scrape configurations.
[Operations](operations.md#metrics) says what to look at first.

- Values of a label are those listed; anything else counts as `other`. No session, request, tenant or text is a label.
- `target_info` has the resource: `service_name`, and what `OTEL_RESOURCE_ATTRIBUTES` says.
- Histograms of durations have buckets from 1 ms (parts of rounds: 50 µs) to 10 s, those of requests to 328 s.
- Nothing is recorded between a verdict and the next round ([what it costs](reports/metrics-cost-2026-11-23.md)).
"""
HEADER = "| name | type | unit | service | labels | meaning |\n|---|---|---|---|---|---|"
VLLM = """\
## vLLM's names

With `vllm_metrics` (`paceline serve --vllm-metrics`) the coordinator, the target and the gateway have these, too,
each with the labels `engine="0"` and `model_name`. They are sums of our own, made when somebody asks. Positions count
from 0. Each service has those whose source it has: read requests from the coordinator or the gateway, and KV and
waiting sessions from targets. `inter_token_latency_seconds` is a round's duration: a round's tokens come together.
"""
VLLM_HEADER = "| name | type | made from |\n|---|---|---|"


def page() -> str:
    """The whole page."""
    own = "\n".join((HEADER, *map(_row, CATALOGUE)))
    vllm = "\n".join((VLLM_HEADER, *map(_alias_row, VLLM_NAMES)))
    return f"{INTRODUCTION}\n{own}\n\n{VLLM}\n{vllm}\n"


def main() -> None:
    """Write the page, or say that it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if it is stale")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        sys.stdout.write(f"{PAGE}: {len(CATALOGUE)} metrics\n")
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE} is stale: python -m tools.metrics")


def _row(spec: MetricSpec) -> str:
    labels = "; ".join(map(_label, spec.labels)) or "–"
    unit = "s" if spec.unit == "s" else "–"
    kind = str(spec.kind)
    return f"| `{spec.exposed_name}` | {kind} | {unit} | {', '.join(spec.services)} | {labels} | {spec.meaning} |"


def _label(label: MetricLabel) -> str:
    values = [value for value in label.values if value]
    if not values:
        return f"`{label.exposed_name}`"
    if len(values) > MOST_SHOWN:
        values = [*values[: MOST_SHOWN - 2], "…", values[-1]]
    return f"`{label.exposed_name}`: {', '.join(values)}"


def _alias_row(alias: VllmName) -> str:
    return f"| `{alias.exposed_name}` | {alias.kind} | {' or '.join(_sources(alias))} |"


def _sources(alias: VllmName) -> Iterator[str]:
    for source in alias.sources:
        selector = ", ".join(f'{label}="{value}"' for label, value in alias.only.items())
        yield f"`{source.exposed_name}{{{selector}}}`" if selector else f"`{source.exposed_name}`"


if __name__ == "__main__":
    main()
