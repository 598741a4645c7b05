"""The metrics that tools for vLLM ask for, under its names.

They are made from ours when they are read, so nothing is counted twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.runtime.metrics import catalogue as names
from paceline.runtime.metrics.catalogue import MetricKind, MetricSpec

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.samples import Sample

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
