"""`paceline_lab.bench.fresh_service`: what runs in which order, and what is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from paceline.client import Generation
from paceline.protocol.generation import ChatMessage, GenerateRequest
from paceline_lab.bench.fresh_service import decode_rate, measure_start, starts, table
from paceline_lab.bench.prompts import Prompt, load_prompts
from tests.lab.fakes import generation, record

PROMPT, *OTHERS = (Prompt("code", name, ((ChatMessage("user", name),),)) for name in ("first", "second", "third"))


@dataclass
class SettlingRunner:
    """Target-only takes 31 ms a token; `auto` at first too, and 41 ms for four from the second request on."""

    calls: list[GenerateRequest] = field(default_factory=list)
    name = "auto"
    target_threads = 2
    processes: Sequence[int] = ()

    def generate(self, request: GenerateRequest) -> Generation:
        self.calls.append(request)
        if request.speculation.off or len(self.calls) == 1:
            return generation(range(128), [record(1, 0)] * 128, 0.0)
        return generation(range(128), [record(5, 3)] * 32, 0.0)


def test_a_rate_is_of_the_rounds_behind_the_first_and_behind_so_many_tokens() -> None:
    slow = replace(record(1, 0), round_ms=100.0)
    stats = generation(range(6), [slow, record(1, 0), slow, record(5, 2)], 0.0).stats
    assert decode_rate(stats) == pytest.approx(5 / (0.031 + 0.1 + 0.041))
    assert decode_rate(stats, behind=2) == pytest.approx(4 / (0.1 + 0.041))
    assert decode_rate(stats, behind=7) == 0.0


def test_the_first_request_is_the_services_first_and_runs_again_when_they_have_settled() -> None:
    runner = SettlingRunner()
    row = measure_start(runner, PROMPT, 0.8, OTHERS)
    asked = [(call.messages[0].content, call.speculation.off) for call in runner.calls]
    assert asked[:3] == [("first", False), ("second", False), ("third", False)]
    assert sorted(asked[3:]) == [("first", False), ("first", False), ("first", True), ("first", True)]
    assert {call.sampling.temperature for call in runner.calls} == {0.8}
    assert row.fresh == pytest.approx(row.plain) == pytest.approx(1 / 0.031)
    assert row.settled == pytest.approx(row.settled_late) == pytest.approx(4 / 0.041)
    assert row.fresh_late == pytest.approx(1 / 0.031)
    assert row.noise == pytest.approx(1)
    text = table([row])
    assert "first request ÷ target-only: 1.00 (1.00 to 1.00); its least met" in text
    assert "its median missed" in text


def test_starts_take_prompts_and_temperatures_in_turns_and_never_settle_on_the_measured_prompt() -> None:
    planned = list(starts(load_prompts(("code", "sql", "chat")), 12))
    assert len({(prompt.kind, prompt.name) for prompt, _, _ in planned}) == 12
    assert {(prompt.kind, temperature) for prompt, temperature, _ in planned} == {
        (kind, temperature) for kind in ("code", "sql", "chat") for temperature in (0.0, 0.8)
    }
    assert all(prompt not in others and len(others) == 3 for prompt, _, others in planned)
