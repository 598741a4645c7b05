"""What real services expose is what the documents say, and what clients are told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from paceline.runtime.metrics.catalogue import CATALOGUE, of_service
from paceline.runtime.metrics.exporters import VLLM_NAMES
from tests.metrics.conftest import Observed
from tests.metrics.scrape import Exposition, faults, selectors
from tools.dashboard import FILE as DASHBOARD
from tools.metrics import PAGE

ROOT = Path(__file__).parents[2]
OTEL = ROOT / "deploy" / "otel"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| [s–] \| ([\w, ]+) \| (.*?) \| ")
LABEL = re.compile(r"`(\w+)`")
VLLM = {
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
}
"""As on vLLM's wire."""


def documented(service: str) -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each metric that the page says a service has."""
    rows = [match for line in PAGE.read_text().splitlines() if (match := ROW.match(line))]
    assert len(rows) == len(CATALOGUE)
    return {
        name: (kind, set(LABEL.findall(labels)))
        for name, kind, services, labels in (match.groups() for match in rows)
        if service in services.split(", ")
    }


def own(exposition: Exposition) -> dict[str, tuple[str, set[str]]]:
    names = [name for name in exposition.types if not name.startswith("vllm:") and name != "target_info"]
    return {name: (exposition.types[name], exposition.labels_of(name)) for name in names}


@pytest.mark.parametrize("service", ["coordinator", "target", "draft"])
def test_the_table_is_what_a_service_exposes(service: str, observed: Observed) -> None:
    assert own(observed.expositions[service]) == documented(service)


def test_the_table_is_what_a_gateway_exposes(gateways: Exposition) -> None:
    assert own(gateways) == documented("gateway")


@pytest.mark.parametrize("service", ["coordinator", "target", "draft"])
def test_labels_have_their_listed_values_alone(service: str, observed: Observed) -> None:
    listed = {
        (spec.exposed_name, label.exposed_name): label.values for spec in of_service(service) for label in spec.labels
    }
    suffix = re.compile(r"_(bucket|count|sum)$")
    for series in observed.expositions[service].series:
        for label, value in series.labels.items():
            values = listed.get((series.name, label)) or listed.get((suffix.sub("", series.name), label))
            assert not values or value in values, series
            assert label in ("le", "position", "engine", "model_name") or values is not None or "info" in series.name


def test_counts_are_what_clients_are_told(observed: Observed) -> None:
    coordinator, stats = observed.expositions["coordinator"], observed.finished
    rounds = sum(each.rounds for each in stats)
    accepted = sum(each.num_accepted_draft_tokens for each in stats)
    records = [record for each in stats for record in each.records]
    assert coordinator.value("paceline_round_duration_seconds_count") == rounds
    assert coordinator.value("paceline_round_part_duration_seconds_count", part="verify") == rounds
    assert coordinator.value("paceline_tokens_committed_total") == sum(each.committed for each in stats)
    assert coordinator.value("paceline_tokens_proposed_total") == sum(each.num_draft_tokens for each in stats) > 0
    assert coordinator.value("paceline_tokens_accepted_total") == accepted > 0
    for position in range(3):
        reached = sum(record.accepted > position for record in records)
        assert not reached or coordinator.value("paceline_tokens_accepted_total", position=str(position)) == reached
    assert coordinator.value("paceline_rounds_proposed_total") == sum(each.num_spec_steps for each in stats)
    assert coordinator.value("paceline_rounds_self_started_total") == sum(each.self_started for each in records)
    assert coordinator.value("paceline_cache_lookups_total", result="miss") == sum(e.cache_misses for e in stats)
    assert coordinator.value("paceline_requests_ended_total", outcome="length") == len(stats)
    assert coordinator.value("paceline_requests_ended_total", outcome="invalid_input") == observed.refused
    assert coordinator.value("paceline_tokens_prompt_total") == observed.prompt_tokens
    assert coordinator.value("paceline_requests_active") == 0
    whole_ms = sum(record.round_ms for record in records)
    assert coordinator.value("paceline_round_duration_seconds_sum") == pytest.approx(whole_ms / 1e3)


def test_services_count_steps_prefixes_and_drafts(observed: Observed) -> None:
    target, draft = observed.expositions["target"], observed.expositions["draft"]
    rounds = sum(each.rounds for each in observed.finished)
    assert target.value("paceline_step_sessions_sum", role="target") >= rounds
    # The last prompt token's row is a round's own.
    prefixes = observed.prompt_tokens - len(observed.finished)
    assert target.value("paceline_prefix_tokens_total") == prefixes
    assert target.value("paceline_prefix_tokens_total", source="reused") > 0
    assert draft.value("paceline_draft_tokens_total", kind="asked") > 0
    assert target.value("paceline_kv_rows") == draft.value("paceline_kv_rows") == 0


def test_vllms_names_are_vllms(observed: Observed, gateways: Exposition) -> None:
    assert {each.exposed_name for each in VLLM_NAMES} == VLLM
    by_service = {
        name: {each for each in exposition.types if each.startswith("vllm:")}
        for name, exposition in observed.expositions.items()
    }
    assert by_service["coordinator"] | by_service["target"] == VLLM
    assert not by_service["draft"]
    assert {"vllm:spec_decode_num_drafts_total", "vllm:num_requests_waiting"} <= gateways.types.keys()
    coordinator = observed.expositions["coordinator"]
    for alias, source in (
        ("vllm:spec_decode_num_draft_tokens_total", "paceline_tokens_proposed_total"),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "paceline_tokens_accepted_total"),
        ("vllm:inter_token_latency_seconds_count", "paceline_round_duration_seconds_count"),
        ("vllm:e2e_request_latency_seconds_sum", "gen_ai_server_request_duration_seconds_sum"),
    ):
        assert coordinator.value(alias, engine="0") == pytest.approx(coordinator.value(source))
    buckets = [each for each in coordinator.series if each.name == "vllm:e2e_request_latency_seconds_bucket"]
    assert max(each.value for each in buckets) == coordinator.value("vllm:e2e_request_latency_seconds_count")


def dashboard_queries() -> list[str]:
    panels = [*json.loads(DASHBOARD.read_text())["panels"]]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alert_queries() -> list[str]:
    (group,) = yaml.safe_load((OTEL / "alerts.yaml").read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


def test_every_query_has_data(observed: Observed, gateways: Exposition) -> None:
    expositions = (*observed.expositions.values(), gateways)
    queries = dashboard_queries() + alert_queries()
    assert len(queries) > 40
    # What no request here caused is there with 0 in any case.
    assert not {query: found for query in queries if (found := faults(query, expositions))}


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {re.sub(r"_(bucket|count|sum)$", "", each.name) for q in dashboard_queries() for each in selectors(q)}
    assert {spec.exposed_name for spec in CATALOGUE} == shown


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(rate(paceline_rounds_total[1m]))", "paceline_rounds_total"),
        ('sum(paceline_sessions_open{role="coordinator"})', "coordinator"),
        ("sum by (session) (paceline_sessions_open)", "session"),
        ('sum(rate(paceline_fallbacks_total{cause=~"drafts_.*"}[1m]))', "drafts_"),
    ],
)
def test_a_query_that_nothing_answers_is_noticed(query: str, fault: str, observed: Observed) -> None:
    (found,) = faults(query, observed.expositions.values())
    assert fault in found


def test_each_request_has_one_line_of_json(observed: Observed) -> None:
    lines = [json.loads(line) for line in observed.log.splitlines() if line.startswith("{")]
    done = [line for line in lines if line["message"].startswith("request done:")]
    assert len({line["request"] for line in done}) == len(done) == len(observed.finished)
    done.sort(key=lambda line: (line["tokens"], line["rounds"]))
    finished = sorted(observed.finished, key=lambda stats: (stats.committed, stats.rounds))
    for line, stats in zip(done, finished, strict=True):
        assert line["tokens"] == stats.committed
        assert line["rounds"] == stats.rounds
        assert line["accepted_per_round"] == pytest.approx(stats.num_accepted_draft_tokens / stats.rounds)
        assert line["reason"] == "length"
    (failed,) = [line for line in lines if line["message"].startswith("request failed:")]
    assert failed["reason"] == "INVALID_INPUT"
