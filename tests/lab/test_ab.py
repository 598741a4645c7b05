"""`paceline bench ab`: who is asked what in which order, what the report makes of it, and a run of each kind."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.protocol.errors import PacelineError
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.records import GenerationStats, RoundRecord, StepTimings
from paceline_lab.bench.ab import command, experiments
from paceline_lab.bench.ab.arms import Arm, ArmRun, ArmServices, ArmsTurn, Case, RunningServices, Stage
from paceline_lab.bench.ab.command import in_order, run_stage, with_arms
from paceline_lab.bench.ab.experiments import EXPERIMENTS, AbOptions
from paceline_lab.bench.ab.report import ab_markdown, arm_lines
from paceline_lab.bench.simulated_pair import OFF, SimulatedPair, request, share_of_ideal
from paceline_lab.bench.users import RequestOutcome, UserRequest
from tests.warm import PACELINE

FAST = SimulatedPair("distribution=middling", 2.0, 0.5)
SERVICES = ArmServices("table:vocab=300")
A, B = Arm("a", SERVICES), Arm("b", SERVICES)

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})


def names(arms: Sequence[Arm]) -> list[str]:
    return [arm.name for arm in arms]


def test_each_arm_has_every_place_and_every_neighbour_and_none_starts_anew_before_the_first_turn() -> None:
    arms = Stage("s", (A, replace(B, starts_anew=True)), ()).all_arms
    turns = [names(in_order(arms, turn)) for turn in range(6)]
    assert sorted(turns) == sorted(map(list, permutations(["a", "b", "a again"])))
    assert all({turn[place] for turn in turns[:3]} == {"a", "b", "a again"} for place in range(3))
    assert names(in_order(arms, -1)) == ["a", "a again"]
    assert names(with_arms(Stage("s", (A, B), ()), ["b"]).all_arms) == ["b", "b again"]


def test_the_first_arm_runs_again_on_its_own_services_or_on_others_like_every_arm() -> None:
    shared, apart = (Stage("s", (A, B), (), apart=apart).all_arms[-1] for apart in (False, True))
    assert (shared.name, shared.services) == ("a again", SERVICES)
    assert apart.services == replace(SERVICES, label="again") != SERVICES


def test_another_checkout_runs_the_last_arm_beside_this_one_and_beside_itself() -> None:
    services = replace(SERVICES, environment={"A": "1"})
    other, mine, again = Stage("s", (A, replace(B, services=services)), ()).against(Path("/tree")).all_arms
    paths = {"PYTHONPATH": "/tree", "PYTHONSAFEPATH": "1"}
    assert (mine.name, mine.services) == ("this tree", services)
    assert (other.name, other.services.environment) == ("other tree", {"A": "1", **paths})
    assert (again.name, again.services.environment) == ("other tree again", {"A": "1", **paths})
    assert len({arm.services.label for arm in (other, mine, again)}) == 3


def test_services_of_another_checkout_run_its_code(tmp_path: Path) -> None:
    (tmp_path / "target_service").mkdir()
    (tmp_path / "target_service" / "__init__.py").touch()
    (tmp_path / "target_service" / "__main__.py").write_text("raise SystemExit('this is the other tree')")
    out = ["--out", str(tmp_path), "--against", str(tmp_path), "--turns", "1"]
    result = runner.invoke(app, ["bench", "ab", "overlap", *out])
    assert result.exit_code == 1
    assert "this is the other tree" in result.stderr


@dataclass
class FakeServices:
    """Stand for those of a label, and note what they are asked; all together fail at one call."""

    label: str
    asked: list[tuple[str, str, int]]
    fails_at: ClassVar[int] = 0

    async def run(self, arm: Arm, requests: Sequence[GenerateRequest], starts_s: Sequence[float] = ()) -> ArmRun:
        self.asked.append((self.label, arm.name, requests[0].seed or 0))
        if len(self.asked) == self.fails_at:
            raise PacelineError("no more")
        return ArmRun(1.0, 1.0, {}, {}, 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, int]]]:
    calls: list[tuple[str, str, int]] = []

    @asynccontextmanager
    async def running(self: ArmServices, folder: Path) -> AsyncIterator[FakeServices]:
        calls.append((self.label, "starts", 0))
        yield FakeServices(self.label, calls)

    monkeypatch.setattr(ArmServices, "running", running)
    yield calls


async def test_arms_share_services_by_label_and_what_starts_anew_does_so_in_each_counted_turn(
    asked: list[tuple[str, str, int]],
) -> None:
    other = replace(SERVICES, label="other")
    stage = Stage(
        "s",
        (A, Arm("b", other), replace(A, name="new", starts_anew=True)),
        [Case("c", [[request(7, 4, OFF)], [request(8, 4, OFF)]])],
    )
    turns: list[ArmsTurn] = []
    shown: list[str] = []
    await run_stage(stage, 2, 1, turns, shown.append)
    assert shown == ["s, c"] * 2
    same, anew = "services", ("services", "starts", 0)
    assert asked[:2] == [anew, ("other", "starts", 0)]
    assert asked[2:5] == [("other", "b", 8), (same, "a", 8), (same, "a again", 8)], "not counted"
    assert asked[5:10] == [(same, "a", 7), ("other", "b", 7), anew, (same, "new", 7), (same, "a again", 7)]
    assert asked[10:] == [("other", "b", 8), anew, (same, "new", 8), (same, "a again", 8), (same, "a", 8)]
    assert [(turn.number, set(turn.runs)) for turn in turns] == [(n, {"a", "b", "new", "a again"}) for n in (0, 1)]


def answer(arrivals_s: Sequence[float], tokens: int, rounds: int) -> UserRequest:
    messages: list[Sequence[int] | bytes] = [[1] * tokens for _ in arrivals_s]
    stats = GenerationStats(rounds=rounds, committed=tokens * len(messages))
    return UserRequest("gRPC", 0.0, RequestOutcome.SERVED, list(arrivals_s), messages, stats=stats)


def test_figures_of_requests_that_ran_at_once() -> None:
    run = ArmRun.of([answer([0.1, 0.2, 0.3], 2, 4), answer([0.2, 0.4], 1, 2)], 0.5, {"target": 0.2})
    assert run.tokens_per_second == pytest.approx(8 / 0.5)
    assert run.slowest_per_second == pytest.approx(5), "one token in 200 ms, the other request four"
    assert run.figures["first token ms"] == pytest.approx(150)
    assert run.figures["between messages ms p50"] == pytest.approx(100)
    assert run.figures["p99"] == pytest.approx(198)
    assert run.figures["tokens a round"] == pytest.approx(8 / 6)
    assert run.cpu_us == {"target": pytest.approx(25_000)}
    other = ArmRun.of([answer([0.1, 0.2, 0.3], 2, 4), answer([0.2, 0.4], 2, 2)], 0.5, {})
    assert run.text != other.text


def rounds(*forward_ms: float) -> tuple[RoundRecord, ...]:
    """Rounds that accept 2 of 4, each behind a draft's steps of so many ms; 0: its proposal was there."""
    common = {"base_length": 1, "round_ms": 99.0, "draft_wait_ms": 500.0, "wire_ms": 1.0, "accept_ms": 0.0}
    return tuple(
        RoundRecord(
            **common,  # type: ignore[arg-type]
            target=StepTimings(),
            proposed=4,
            accepted=2,
            cache_hit=not ms,
            draft=StepTimings(forward_ms=ms or 8.0, queue_ms=50.0, service_ms=60.0),
        )
        for ms in forward_ms
    )


def test_the_ideal_pays_for_verification_and_for_the_drafting_of_misses_alone() -> None:
    records = (*rounds(9.0, 0.0, 6.0), replace(rounds(0.0)[0], proposed=0, accepted=0))
    stats = GenerationStats(rounds=4, committed=13, tokens_per_second=100.0, records=records)
    # Behind the first round 10 tokens took 100 ms; the last round's proposal was no hit, since it had none.
    assert share_of_ideal(stats, 30.0) == pytest.approx((3 * 30 + 6 + 8) / 100)
    alone = replace(answer([0.1, 0.2], 2, 4), stats=stats)
    assert ArmRun.of([alone], 0.5, {}, step_ms=30.0).figures["of the ideal"] == pytest.approx(1.04)
    assert ArmRun.of([alone], 0.5, {}).figures["of the ideal"] == 0.0
    assert ArmRun.of([alone, alone], 0.5, {}, step_ms=30.0).figures["of the ideal"] == 0.0


def turn(number: int, **speeds: float) -> ArmsTurn:
    runs = {
        name.replace("_", " "): ArmRun(speed, 2 * speed, {"first token ms": speed}, {"target": 3.0}, int(speed == 5))
        for name, speed in speeds.items()
    }
    return ArmsTurn("s", "c", number, runs)


def test_ratios_are_of_one_turn_and_the_first_arms_second_run_is_the_noise() -> None:
    stage = Stage("s", (A, B), [Case("c", []), Case("not run", [])])
    turns = [turn(0, a=10, b=20, a_again=11), turn(1, a=20, b=20, a_again=20), turn(2, a=4, b=6, a_again=5)]
    (first, _), (second, figures), (again, _) = arm_lines([stage], turns)
    assert (first["÷ a"], first["same text"]) == ("1.000 (1.000 to 1.000)", "3 of 3")
    assert (second["÷ a"], second["lower 95 %"]) == ("1.500 (1.000 to 2.000)", 1.0)
    assert (again["arm"], again["÷ a"]) == ("a again", "1.100 (1.000 to 1.250)")
    assert again["same text"] == "2 of 3"
    cell = {"stage": "s", "case": "c", "arm": "b"}
    assert figures == cell | {"first token ms": 20, "CPU µs a token": "3", "by process": "target 3"}
    text = ab_markdown("Title", [stage], turns)
    assert text.startswith("# Title\n")
    assert "| s | c | b | 3 | 20.0 (6.0 to 20.0) | 1.500 (1.000 to 2.000) | 1.000 |" in text


def test_every_experiment_has_a_question_cases_with_requests_and_arms_with_names_of_their_own() -> None:
    with ExitStack() as stack:
        for name, experiment in EXPERIMENTS.items():
            assert experiment.__doc__, name
            for stage in experiment(AbOptions(users=(2,)), stack):
                assert len({arm.name for arm in stage.all_arms}) == len(stage.arms) + 1, name
                assert len({case.name for case in stage.cases}) == len(stage.cases), name
                for case in stage.cases:
                    assert all(len(asked) == (1 if name == "edits" else 2) for asked in case.turns), name


def test_an_arm_changes_a_cases_requests_as_it_says() -> None:
    with ExitStack() as stack:
        (stage,) = EXPERIMENTS["edits"](AbOptions(), stack)
    (asked,), *others = stage.cases[0].turns
    assert len(others) >= 9
    told = [arm.name for arm in stage.arms if arm.request(asked).prediction_text]
    assert told == ["prediction", "auto with prediction"]
    assert asked.prediction_text in asked.messages[0].content
    assert not asked.ignore_eos
    assert A.request(asked) == asked
    assert replace(A, speculation=OFF).request(asked) == replace(asked, speculation=OFF)


def measured(tmp_path: Path, *arguments: str) -> Any:
    result = runner.invoke(app, ["bench", "ab", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    return json.loads(next(tmp_path.glob("*.json")).read_text())


def test_http_and_grpc_write_the_same_texts_and_each_process_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "PAIR", FAST)
    turns = measured(tmp_path, "http", "--users", "2", "--tokens", "24", "--turns", "1")["turns"]
    stages = ("target-only", "drafts of 4")
    assert [(each["stage"], each["number"]) for each in turns] == [(stage, 0) for stage in stages]
    for each in turns:
        assert set(each["runs"]) == {"gRPC", "HTTP", "gRPC again"}
        assert len({run["text"] for run in each["runs"].values()}) == 1
        for run in each["runs"].values():
            assert set(run["cpu_us"]) == {"target", "draft", "coordinator", "gateway", "clients"}
            assert run["tokens_per_second"] > 0 and run["slowest_per_second"] > 0
    assert sum(each["runs"]["HTTP"]["cpu_us"]["gateway"] for each in turns) > 0
    text = next(tmp_path.glob("*.md")).read_text()
    assert text.startswith("# Http: what streamed completions")
    assert "- commit:" in text and f"- services: {FAST.target} with {FAST.drafter}\n" in text


@pytest.mark.full
def test_services_that_start_anew_and_settled_ones_write_the_same_texts(tmp_path: Path) -> None:
    model = ["--model", "table:vocab=300,seed=1", "--tokens", "8"]
    turns = measured(tmp_path, "fresh", *model, "--turns", "1")["turns"]
    assert [each["case"] for each in turns] == [f"{kind}, 1 at once" for kind in ("code", "sql", "chat")]
    for each in turns:
        assert list(each["runs"]) == ["target-only", "settled", "fresh", "target-only again"]
        assert len({run["text"] for run in each["runs"].values()}) == 1


class LostUsers:
    """Nobody is served."""

    async def ask(self, asked: GenerateRequest) -> UserRequest:
        return UserRequest("gRPC", 0.0).end(RequestOutcome.LOST, why="gone")

    async def connect(self, count: int) -> None:
        """They never come."""


async def test_a_request_that_is_not_served_ends_the_run_and_says_why() -> None:
    lost: Any = RunningServices({}, LostUsers(), None)  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match="of the arm 'a' was lost: gone"):
        await lost.run(A, [request(1, 4, OFF)])


def test_what_was_measured_before_a_failure_is_reported(
    asked: list[tuple[str, str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage("s", (A, B), [Case("c", [[request(1, 4, OFF)]])])
    monkeypatch.setitem(vars(command)["EXPERIMENTS"], "mine", lambda options, stack: [stage])
    monkeypatch.setitem(vars(command)["SETTLING"], "mine", 0)
    monkeypatch.setattr(FakeServices, "fails_at", 1 + 3 + 2)
    with pytest.raises(PacelineError, match="no more"):
        command.measure_ab("mine", AbOptions(), 5, (), None, tmp_path)
    (report,) = tmp_path.glob("mine-*.json")
    assert [turn["number"] for turn in json.loads(report.read_text())["turns"]] == [0]


def test_sigterm_stops_the_services_too(tmp_path: Path) -> None:
    asked = ["bench", "ab", "http", "--users", "1", "--turns", "500", "--out", str(tmp_path)]
    bench = psutil.Popen([*PACELINE, *asked], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(services := children_of(bench)) < 4:  # a target, a draft, a coordinator and a gateway
        assert bench.poll() is None
        assert time.monotonic() < deadline, services
        time.sleep(0.05)
    bench.terminate()
    assert bench.wait(60) != 0
    _, alive = psutil.wait_procs(services, 10)
    assert not alive


def children_of(bench: psutil.Popen) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):  # one ended meanwhile
        return [child for child in bench.children() if "resource_tracker" not in " ".join(child.cmdline())]
    return []


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["http", "--users", "0"], ("users", "0")),
        (["http", "--users", "many"], ("users", "many")),
        (["http", "--turns", "0"], ("turns", "0")),
        (["http", "--tokens", "1"], ("tokens", "1", "at least 2")),
        (["http", "--arms", "off"], ("arms", "off", "gRPC, HTTP")),
        (["http", "--against", "gone"], ("against", "gone", "folder")),
        (["loads"], ("experiment", "loads", "http, tracing, overlap")),
    ],
)
def test_what_no_grid_has_is_refused_by_name(given: list[str], named: tuple[str, ...], tmp_path: Path) -> None:
    result = runner.invoke(app, ["bench", "ab", *given, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert all(part in result.stderr for part in named), result.stderr
    assert not list(tmp_path.iterdir())
