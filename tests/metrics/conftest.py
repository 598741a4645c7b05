from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from paceline.client import PacelineError
from paceline.protocol.generation import GenerateRequest, SpeculationSettings
from paceline.protocol.records import GenerationStats
from paceline.runtime import metrics
from paceline.runtime.config import ServerSettings
from tests.e2e.cluster import NEAR, TARGET, Cluster, eventually, free_port
from tests.metrics.scrape import Exposition

REPEATING = (1, 2, 3, 4, 5, 6) * 6
OPENING = 0
"""Of `think=1`."""
MODEL = SpeculationSettings(drafter="model", num_draft_tokens=3)
NGRAM = SpeculationSettings(drafter="ngram", num_draft_tokens=4)


@dataclass(frozen=True)
class Observed:
    """A cluster that served some requests, how those went, and what its services expose since."""

    ports: Mapping[str, int]
    expositions: Mapping[str, Exposition]
    finished: tuple[GenerationStats, ...]
    refused: int
    prompt_tokens: int
    log: str


def requests() -> Iterator[GenerateRequest]:
    """Target-only, drafted, copied, planned; and one that begins inside a span of reasoning."""
    for speculation in (MODEL, NGRAM, SpeculationSettings(off=True), SpeculationSettings(), SpeculationSettings()):
        yield GenerateRequest(token_ids=REPEATING, seed=4, max_new_tokens=40, speculation=speculation)
    yield GenerateRequest(token_ids=(2, OPENING), seed=4, max_new_tokens=4)


MOST_WAVES = 8


def wave() -> Iterator[GenerateRequest]:
    """Requests that share the target for as long as they run, so that a mode of theirs is measured."""
    for seed in range(4):
        yield GenerateRequest(token_ids=REPEATING, seed=seed, max_new_tokens=400, ignore_eos=True)


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Three services with metrics and vLLM's names, after a few requests; they still run."""
    ports = {name: free_port() for name in ("coordinator", "target", "draft")}
    common = {"server.vllm_metrics": True, "server.log_format": "json"}
    flags: dict[str, Any] = {f"{name}_flags": {"server.metrics_port": port, **common} for name, port in ports.items()}
    asked, folder = [*requests()], tmp_path_factory.mktemp("metrics")
    with Cluster(folder, f"{TARGET},think=1", (f"model:{NEAR},think=1",), **flags) as cluster:
        with cluster.client() as client:
            stats = [client.generate(each).stats for each in asked]
            for _ in range(MOST_WAVES):  # how soon a mode is left hangs on the machine
                together = [*wave()]
                with ThreadPoolExecutor(len(together)) as threads:
                    stats += [each.stats for each in threads.map(client.generate, together)]
                asked += together
                if any(each.name == "paceline_group_gain" for each in Exposition.at(ports["coordinator"]).series):
                    break
            finished = tuple(stats)
            with pytest.raises(PacelineError):
                client.generate(GenerateRequest(token_ids=(10_000,), max_new_tokens=1))
        cluster.wait_idle()
        # A refusal is counted behind its status, and a step behind its verdicts.
        for name, metric, least in (
            ("coordinator", "paceline_requests_ended_total", len(asked) + 1),
            ("target", "paceline_step_sessions_sum", sum(each.rounds for each in finished)),
            ("draft", "paceline_draft_shadow_total", 1),
        ):
            eventually(partial(_has_counted, ports[name], metric, least), metric)
        log = cluster.processes["coordinator"].log_file.read_text()
        expositions = {name: Exposition.at(port) for name, port in ports.items()}
        prompts = sum(len(each.token_ids) for each in asked)
        yield Observed(ports, expositions, finished, 1, prompts, log)


def _has_counted(port: int, metric: str, least: float) -> bool:
    return Exposition.at(port).value(metric) >= least


@pytest.fixture(scope="session")
def gateways() -> Exposition:
    """What a gateway exposes that has served a request."""
    metrics.configure("paceline-gateway", ServerSettings(vllm_metrics=True), model="m", prometheus=True)
    try:
        metrics.http_request_done("/v1/models", 200, 0.003)
        return Exposition.of(metrics.exposition()[0].decode())
    finally:
        metrics.shutdown()
