"""Metrics of one process: off without a trace, on within bounds, to whoever asks."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from concurrent import futures
from functools import partial

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as otlp
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as otlp_grpc

from paceline.protocol.errors import InvalidInput, Overloaded
from paceline.protocol.explanation import CandidateExplanation, GroupReport, ModeReport, PlanExplanation
from paceline.protocol.generation import Provenance
from paceline.protocol.records import GenerationStats, RoundRecord, StepTimings
from paceline.runtime import metrics
from paceline.runtime.config import ServerSettings
from paceline.runtime.metrics.catalogue import OTHER, range_of
from tests.metrics.scrape import Exposition

RECORD = RoundRecord(7, 21.0, 1.2, 0.6, StepTimings(0.4, 17.0, 0.3, 17.9, 5, 1), 0.1, 4, 3, True, "model")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without settings of the machine's, and without metrics afterwards."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_METRICS_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    yield
    metrics.shutdown()


@pytest.fixture
def coordinator(quiet: None) -> None:
    assert metrics.configure("paceline-coordinator", model="m", prometheus=True)


def exposed() -> Exposition:
    return Exposition.of(metrics.exposition()[0].decode())


def test_a_taken_port_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=rf"server\.metrics_port = '127\.0\.0\.1:{port}'"):
            metrics.configure("paceline-target", ServerSettings(metrics_port=port))
    assert not metrics.is_on()


def test_a_free_port_is_told_and_let_go(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        metrics.configure("paceline-target", ServerSettings(metrics_port=0))
    line = re.search(r"metrics: path=/metrics host=127\.0\.0\.1 port=(\d+)", caplog.text)
    assert line is not None
    port = int(line[1])
    assert "paceline_sessions_refused_total" in Exposition.at(port).types
    metrics.shutdown()
    with pytest.raises(OSError, match="refused"):
        Exposition.at(port)
    assert metrics.configure("paceline-target", ServerSettings(metrics_port=port))


class MetricsReceiver(otlp_grpc.MetricsServiceServicer):
    """Keeps what exporters send."""

    def __init__(self) -> None:
        self.requests: list[otlp.ExportMetricsServiceRequest] = []

    def Export(self, request: otlp.ExportMetricsServiceRequest, context: object) -> otlp.ExportMetricsServiceResponse:
        self.requests.append(request)
        return otlp.ExportMetricsServiceResponse()


def test_an_otlp_receiver_gets_the_same_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, server = MetricsReceiver(), grpc.server(futures.ThreadPoolExecutor(1))
    otlp_grpc.add_MetricsServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    assert metrics.configure("paceline-draft")
    metrics.step_done(0.02, 5, 1)
    metrics.proposal_sent(4, on_request=True)
    metrics.shutdown()
    server.stop(0).wait()
    (resource,) = receiver.requests[-1].resource_metrics
    assert any(a.value.string_value == "paceline-draft" for a in resource.resource.attributes)
    (scope,) = resource.scope_metrics
    by_name = {metric.name: metric for metric in scope.metrics}
    assert by_name["paceline.step.duration"].histogram.data_points[0].count == 1
    assert by_name["paceline.step.duration"].unit == "s"
    asked = {p.attributes[0].value.string_value: p.as_int for p in by_name["paceline.draft.tokens"].sum.data_points}
    assert asked == {"asked": 4, "prepared": 0}


def test_what_a_label_does_not_list_is_other(coordinator: None) -> None:
    metrics.fell_back("session 17")
    metrics.fell_back("session 18")
    assert exposed().value("paceline_fallbacks_total", cause=OTHER) == 2


def test_values_that_come_from_elsewhere_are_bounded() -> None:
    metrics.configure("paceline-gateway", prometheus=True)
    for number in range(200):
        metrics.http_request_done(f"/v1/{number}", 200, 0.001)
    series = [each for each in exposed().series if each.name == "http_server_request_duration_seconds_count"]
    assert len(series) == 65
    assert exposed().value("http_server_request_duration_seconds_count", http_route=OTHER) == 136


def test_a_request_waits_then_runs_then_has_ended(coordinator: None) -> None:
    def active(state: str) -> float:
        return exposed().value("paceline_requests_active", state=state)

    with metrics.RequestMeter() as meter:
        assert (active("waiting"), active("running")) == (1, 0)
        meter.round_done(RECORD, (Provenance.ACCEPTED,) * 3 + (Provenance.RECOVERED,))
        assert (active("waiting"), active("running")) == (0, 1)
        meter.done(GenerationStats(rounds=1, committed=4), "stop")
    assert (active("waiting"), active("running")) == (0, 0)
    with pytest.raises(Overloaded), metrics.RequestMeter():
        raise Overloaded("full")
    found = exposed()
    assert found.value("paceline_requests_ended_total", outcome="stop") == 1
    assert found.value("paceline_requests_ended_total", outcome="overloaded") == 1
    assert found.value("gen_ai_server_request_duration_seconds_count", error_type="overloaded") == 1
    assert found.value("paceline_tokens_committed_total", provenance="accepted") == 3
    assert found.value("paceline_cache_lookups_total", result="hit") == 1


class ReadRounds(tuple[RoundRecord, ...]):
    """Records that count how often somebody goes through them."""

    times = 0

    def __iter__(self) -> Iterator[RoundRecord]:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("vllm", [False, True])
def test_a_gateway_goes_through_rounds_for_vllm_s_names_alone(vllm: bool) -> None:
    metrics.configure("paceline-gateway", ServerSettings(vllm_metrics=vllm), model="m", prometheus=True)
    records = ReadRounds([RECORD, RECORD])
    with metrics.RequestMeter() as meter:
        meter.take_rounds(records)
        meter.done(GenerationStats(rounds=2, committed=8), "stop")
    assert records.times == vllm
    if vllm:
        assert exposed().value("vllm:spec_decode_num_accepted_tokens_total") == 2 * RECORD.accepted


@pytest.mark.parametrize(("account_ms", "not_slower", "within"), [(-4.0, 1, 1), (0.5, 0, 1), (5.0, 0, 0)])
def test_the_account_is_a_share_of_the_request(
    account_ms: float, not_slower: int, within: int, coordinator: None
) -> None:
    way = CandidateExplanation("wait", 4, 3.1, 27.0, 32)
    plan = PlanExplanation((20.0, 21.5, 23.0, 28.0), candidates=(way,), account_ms=account_ms, account_bound_ms=2.0)
    with metrics.RequestMeter() as meter:
        meter.done(GenerationStats(records=(RECORD,) * 5), "length", plan)
    found = exposed()
    assert found.value("paceline_request_overtime_bucket", le="0.0") == not_slower
    assert found.value("paceline_request_overtime_bucket", le="0.03") == within
    assert found.value("paceline_requests_over_bound_total") == (account_ms > 2.0)
    assert found.value("paceline_planner_rounds_total", way="wait", draft_tokens="4") == 32
    assert found.value("paceline_planner_row_duration_seconds") == pytest.approx(0.0015)


def test_groups_are_shown_as_they_come_and_go_and_gains_where_they_are_measured(coordinator: None) -> None:
    modes = (ModeReport("rest", "waits", None, 12.0), ModeReport("drafts", "runs", 1.25), ModeReport("new", "waits"))
    groups: dict[str, GroupReport] = {}
    metrics.watch_groups(lambda: groups.items())
    assert "paceline_group_mode" not in exposed().types
    groups["t:1"] = GroupReport("drafts", modes=modes)
    exposition = exposed()
    value = partial(exposition.value, target="t:1")
    assert [value("paceline_group_mode", mode=mode) for mode in ("rest", "drafts", OTHER)] == [0, 1, 0]
    assert value("paceline_group_wait_steps", mode="rest") == 12
    gains = [each.labels["mode"] for each in exposition.series if each.name == "paceline_group_gain"]
    assert (gains, value("paceline_group_gain", mode="drafts")) == (["drafts"], 1.25)
    groups["t:2"] = groups.pop("t:1")
    assert {each.labels["target"] for each in exposed().series if each.name == "paceline_group_mode"} == {"t:2"}


@pytest.mark.parametrize(("count", "shown"), [(8, "8"), (9, "9-12"), (64, "33-64"), (65, OTHER)])
def test_lengths_are_told_by_ranges(count: int, shown: str) -> None:
    assert range_of(count) == shown
