"""`paceline bench load`: what is asked when, over gRPC and over HTTP, and a run of each kind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.client import AsyncClient
from paceline.local.settings import local_settings
from paceline.local.supervisor import SupervisedServices
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import ChatMessage, GenerateEvent, GenerateRequest
from paceline_lab.bench.ab.arms import ArmServices
from paceline_lab.bench.ab.load import Arrivals, LoadPlan
from paceline_lab.bench.prompts import Prompt

PROMPTS = [Prompt("kind", str(number), ((ChatMessage("user", f"question {number}"),),)) for number in range(5)]
PLAN = LoadPlan(PROMPTS, sessions=(1, 3), lengths=(2, 8), waves=2, tokens=8)
TABLE = "table:vocab=300,step_ms=2"

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})


def test_every_wave_has_other_questions_and_every_arm_the_same() -> None:
    stage = PLAN.stage(ArmServices(TABLE))
    assert [arm.name for arm in stage.all_arms] == ["off", "k = 2", "k = 8", "auto", "off again"]
    one, three = stage.cases
    assert [[request.messages[0].content[-1] for request in wave] for wave in three.turns] == [[*"012"], [*"340"]]
    assert [len(wave) for wave in one.turns] == [1, 1]
    assert len({request.seed for wave in three.turns for request in wave}) == 6
    off, two, _, auto, _ = (arm.request(three.turns[0][0]).speculation for arm in stage.all_arms)
    assert (off.off, two.num_draft_tokens, auto.num_draft_tokens) == (True, 2, None)


def test_requests_at_a_rate_come_apart_at_the_same_times_in_every_run() -> None:
    plan = LoadPlan(PROMPTS, sessions=(64,), arrivals=Arrivals.POISSON, rate=8.0)
    (case,), (again,) = (plan.stage(ArmServices(TABLE)).cases for _ in range(2))
    assert case.starts_s == again.starts_s == tuple(sorted(case.starts_s))
    assert 64 / 8 * 0.6 <= case.starts_s[-1] <= 64 / 8 * 1.6
    (together,) = LoadPlan(PROMPTS, sessions=(64,)).stage(ArmServices(TABLE)).cases
    assert together.starts_s == ()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompts", {"prompts": []}),
        ("sessions", {"sessions": (257,)}),
        ("sessions", {"sessions": ()}),
        ("tokens", {"tokens": 1}),
        ("rate", {"rate": 0.0}),
        ("waves", {"waves": 0}),
        ("temperature", {"temperature": -1.0}),
    ],
)
def test_a_plan_out_of_its_limits_is_refused_by_name(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=field):
        LoadPlan(**{"prompts": PROMPTS, **change})


@pytest.mark.parametrize("via", [pytest.param("grpc", marks=pytest.mark.full), "http"])
def test_a_run_says_speed_slowest_first_token_drafted_rounds_and_cpu(via: str, tmp_path: Path) -> None:
    options = ["--sessions", "2", "--tokens", "8", "--waves", "1", "--kind", "chat", "--via", via, "--k", "2"]
    arrivals = ["--arrivals", "poisson", "--rate", "50"] if via == "http" else []
    drafter = ["--drafter", f"auto:{TABLE}"]
    result = runner.invoke(app, ["bench", "load", TABLE, *drafter, *options, *arrivals, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (report,) = tmp_path.glob("load-*.json")
    values = json.loads(report.read_text())
    runs = values["turns"][0]["runs"]
    assert {run["text"] for run in runs.values()} == {runs["off"]["text"]}
    assert runs["off"]["figures"]["rounds that drafted"] == 0
    assert runs["k = 2"]["figures"]["rounds that drafted"] > 0.5
    for run in runs.values():
        assert run["tokens_per_second"] > 0 and run["slowest_per_second"] > 0
        assert run["figures"]["first token ms"] > 0
        assert {"target", "draft", "coordinator"} <= set(run["cpu_us"])
    assert via.upper() in values["facts"]["requests"].upper()


def test_coordinators_that_run_are_asked_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--sessions", "4", "--tokens", "8", "--waves", "1", "--kind", "chat", "--out", str(tmp_path)]
    asked, stream = Counter[int](), AsyncClient.stream

    def count(client: AsyncClient, *request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        asked[id(client)] += 1
        return stream(client, *request)

    monkeypatch.setattr(AsyncClient, "stream", count)
    with SupervisedServices(local_settings(TABLE, "none"), tmp_path / "services") as services:
        addresses = f"{services.address},{services.address}"
        result = runner.invoke(app, ["bench", "load", "--url", addresses, *options])
    assert result.exit_code == 0, result.output
    (report,) = tmp_path.glob("load-*.json")
    values = json.loads(report.read_text())
    assert addresses in values["facts"]["services"]
    assert all(run["tokens_per_second"] > 0 for run in values["turns"][0]["runs"].values())
    first, second = asked.values()
    assert first == second >= 12


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--url", "127.0.0.1:1", "--via", "http"), "via = 'http': must be grpc, with --url"),
        ((TABLE, "--via", "pigeon"), "via = 'pigeon': must be one of: grpc, http"),
    ],
)
def test_a_way_that_is_not_there_is_refused_by_name(given: tuple[str, ...], said: str) -> None:
    result = runner.invoke(app, ["bench", "load", *given])
    assert (result.exit_code, said in result.output) == (2, True)
