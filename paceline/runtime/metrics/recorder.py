"""The counts of a process. At most one recorder is active; while metrics are off nothing is recorded.

Counters are plain integers that exporters read when they collect: adding to one costs less than a microsecond.
Histograms are the SDK's, several microseconds each, so nothing between a verdict and the next round records one. All
recording is on the process's event loop; exporters read from threads of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from paceline.runtime.metrics.catalogue import OTHER, MetricKind, MetricLabel, MetricSpec

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

MAX_CONFIGURED_VALUES = 64
"""Most values of a label whose values the catalogue doesn't list; further ones count as `OTHER`."""

Values = tuple[str, ...]
Read = Callable[[], float]
ReadAll = Callable[[], Iterable[tuple[Values, float]]]


class MetricRecorder:
    """The instruments of one service.

    Args:
        meter: makes the instruments; None: there are none.
        specs: the metrics to make; records of others are dropped.
        service: the service's name, as `catalogue.TARGET`.
        model: the name of the served model, a label of some metrics.
    """

    def __init__(self, meter: Meter | None, specs: Iterable[MetricSpec], service: str, model: str) -> None:
        self.service = service
        self.model = model
        self._attributes: dict[tuple[MetricSpec, Values], dict[str, str]] = {}
        self._label_values: dict[MetricLabel, set[str]] = {}
        self._counts: dict[MetricSpec, dict[Values, int]] = {}
        self._gauges: dict[MetricSpec, dict[Values, Read]] = {}
        self._read_all: dict[MetricSpec, ReadAll] = {}
        self._histograms: dict[MetricSpec, Histogram] = {}
        for spec in specs:
            assert meter is not None, "it makes every spec"
            self._make(meter, spec)

    def makes(self, spec: MetricSpec) -> bool:
        """Whether records of this metric are kept."""
        return spec in self._counts or spec in self._gauges or spec in self._histograms

    def count(self, spec: MetricSpec, n: int, *values: str) -> None:
        """Add to a counter."""
        counts = self._counts.get(spec)
        if counts is not None:
            series = self._series_of(spec, values)
            counts[series] = counts.get(series, 0) + n

    def observe(self, spec: MetricSpec, value: float, *values: str) -> None:
        """Record one value of a histogram; a value below 0 counts as 0, as clocks may jump."""
        histogram = self._histograms.get(spec)
        if histogram is not None:
            labels = self._attributes.get((spec, values)) or self._labels_of(spec, self._series_of(spec, values))
            histogram.record(max(0.0, value), labels)

    def watch(self, spec: MetricSpec, read: Read, *values: str) -> None:
        """Have a gauge read when it is collected, on an exporter's thread."""
        if spec in self._gauges:
            self._gauges[spec][self._series_of(spec, values)] = read

    def watch_all(self, spec: MetricSpec, read: ReadAll) -> None:
        """Have all series of a gauge read when it is collected, for series that come and go; else like `watch`."""
        if spec in self._gauges:
            self._read_all[spec] = read

    def _make(self, meter: Meter, spec: MetricSpec) -> None:
        if spec.kind is MetricKind.HISTOGRAM:
            bounds = [*map(float, spec.buckets)]  # an integer would be `le="1"`, which Prometheus 3 calls "1.0"
            self._histograms[spec] = meter.create_histogram(
                spec.name, spec.unit, spec.meaning, explicit_bucket_boundaries_advisory=bounds
            )
        elif spec.kind is MetricKind.GAUGE:
            self._gauges[spec] = {}
            reader = self._reader(spec, partial(self._read_gauge, spec))
            meter.create_observable_gauge(spec.name, [reader], spec.unit, spec.meaning)
        else:
            counts = self._counts[spec] = dict.fromkeys(self._from_the_start(spec), 0)
            meter.create_observable_counter(
                spec.name, [self._reader(spec, lambda: list(counts.items()))], spec.unit, spec.meaning
            )

    def _read_gauge(self, spec: MetricSpec) -> Iterator[tuple[Values, float]]:
        yield from [(values, read()) for values, read in list(self._gauges[spec].items())]
        if spec in self._read_all:
            yield from ((self._series_of(spec, values), value) for values, value in self._read_all[spec]())

    def _from_the_start(self, spec: MetricSpec) -> Iterable[Values]:
        """Series that are there with 0 from the start, so that their first count is seen as a growth."""
        if not all(label.starts_at_zero and label.values for label in spec.labels):
            return ()
        roles = (self.service,)
        return itertools.product(*(roles if label.name == "role" else label.values for label in spec.labels))

    def _reader(
        self, spec: MetricSpec, read: Callable[[], Iterable[tuple[Values, float]]]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        return lambda _: [Observation(value, self._labels_of(spec, values)) for values, value in read()]

    def _series_of(self, spec: MetricSpec, values: Values) -> Values:
        assert len(values) == len(spec.labels), f"{spec.name} has the labels {spec.labels}"
        return tuple(map(self._bounded_value, spec.labels, values))

    def _bounded_value(self, label: MetricLabel, value: str) -> str:
        if label.values:
            return value if value in label.values else OTHER
        label_values = self._label_values.setdefault(label, set())
        if len(label_values) < MAX_CONFIGURED_VALUES:
            label_values.add(value)
        return value if value in label_values else OTHER

    def _labels_of(self, spec: MetricSpec, values: Values) -> dict[str, str]:
        key = spec, values
        if key not in self._attributes:
            labels = (label.name for label in spec.labels)
            self._attributes[key] = {label: value for label, value in zip(labels, values, strict=True) if value}
        return self._attributes[key]


_OFF = MetricRecorder(None, (), "", "")
_active = _OFF


def active() -> MetricRecorder:
    """The process's recorder; while metrics are off, one that drops all records."""
    return _active


def activate(recorder: MetricRecorder | None) -> None:
    """Record with this one from now on; None: switch metrics off."""
    global _active
    _active = recorder or _OFF
