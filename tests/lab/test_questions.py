"""Prompts from a file: which are taken, what a bad line is told, and that a second turn sees the first answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.client import Generation
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.generation import GenerateRequest
from paceline.protocol.proposal import Acceptance
from paceline_lab.bench.peers.process import Answer
from paceline_lab.bench.peers.run import Contest, ContestPlan, run_contest
from paceline_lab.bench.prompts.questions import load_questions
from paceline_lab.bench.speed.run import SpeedPlan, run_speed
from paceline_lab.bench.speed.settings import drafter_settings
from tests.lab.fakes import FakeRunner, generation, record

TARGET = "table:vocab=300,seed=1"
QUESTIONS = (
    {"question_id": 1, "category": "bridge", "turns": ["What spans the river?", "And the valley?"]},
    {"question_id": 3, "category": "sum", "turns": ["What is 2 + 2?"]},
    {"question_id": 5, "category": "bridge", "turns": ["What spans the road?"], "reference": ["a footbridge"]},
    {"question_id": "7b", "category": "bridge", "turns": ["What spans the railway?"]},
)

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "PACELINE_HOME": ""})


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    return file


def named(file: Path, *categories: str, per_category: int = 8) -> dict[str, list[str]]:
    found = load_questions(file, categories, per_category)
    return {category: [prompt.name for prompt in prompts] for category, prompts in found.items()}


def test_the_first_questions_of_each_category_are_taken_in_the_file_s_order(questions: Path) -> None:
    assert named(questions) == {"bridge": ["1", "5", "7b"], "sum": ["3"]}
    assert named(questions, per_category=2) == {"bridge": ["1", "5"], "sum": ["3"]}
    assert named(questions, "sum", "bridge", per_category=1) == {"sum": ["3"], "bridge": ["1"]}


BAD_LINES = {
    "not JSON": ("{", "JSON"),
    "no object": ("[]", "a JSON object"),
    "no turns": ('{"question_id": 2, "category": "a"}', "turns = None: must be given"),
    "empty turns": ('{"question_id": 2, "category": "a", "turns": []}', "turns = []"),
    "a turn that is no text": ('{"question_id": 2, "category": "a", "turns": ["b", 3]}', "turns[1] = 3"),
    "a category that is no text": ('{"question_id": 2, "category": 4, "turns": ["b"]}', "category = 4"),
    "no id": ('{"category": "a", "turns": ["b"]}', "question_id = None"),
    "an odd id": ('{"question_id": true, "category": "a", "turns": ["b"]}', "question_id = True"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_with_its_file_number_and_field(questions: Path, case: str) -> None:
    line, fault = BAD_LINES[case]
    questions.write_text(questions.read_text() + line + "\n")
    with pytest.raises(InvalidInput) as error:
        load_questions(questions)
    assert f"{questions} line 5" in error.value.message
    assert fault in error.value.message


@pytest.mark.parametrize(
    ("command", "arguments", "parts"),
    [
        ("speed", ["--prompts", "FILE", "--category", "sum,poem"], ("category = 'poem'", "one of bridge, sum")),
        ("peers", ["--prompts", "FILE", "--per-category", "0"], ("per_category = 0", "at least 1")),
        ("speed", ["--prompts", "FILE", "--kind", "chat"], ("kind = 'chat'", "--category")),
        ("speed", ["--prompts", "none.jsonl"], ("none.jsonl",)),
        ("peers", ["--category", "qa"], ("qa",)),
    ],
)
def test_bad_choices_are_one_line(
    questions: Path, command: str, arguments: list[str], parts: tuple[str, ...]
) -> None:
    given = [str(questions) if argument == "FILE" else argument for argument in arguments]
    result = runner.invoke(app, ["bench", command, TARGET, *given])
    assert result.exit_code == 2
    assert all(part in result.stderr for part in parts), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidInput, match="one question or more"):
        load_questions(tmp_path / "empty.jsonl")


class AnsweringRunner(FakeRunner):
    """Says which of its requests an answer is to."""

    def generate(self, request: GenerateRequest) -> Generation:
        self.calls.append((self.name, request))
        said = f"answer to {request.messages[-1].content}"
        answered = generation(range(4), [record(1, 0)] * 4, 20.0)
        return Generation(said, answered.token_ids, (1,), answered.finish_reason, 0, (), answered.stats)


def test_a_second_turn_follows_the_first_and_its_answer(questions: Path) -> None:
    groups = {name: AnsweringRunner(name) for name in ("none", "ngram")}
    settings = drafter_settings(("ngram",), (Acceptance.COUPLED,), (None,))
    run_speed(SpeedPlan(load_questions(questions, ("bridge",), 1), settings, pairs=1, tokens=9), groups, print)
    for group in groups.values():
        *_, first, second = [call for _, call in group.calls]
        assert [message.content for message in first.messages] == ["What spans the river?"]
        assert [(message.role, message.content) for message in second.messages] == [
            ("user", "What spans the river?"),
            ("assistant", "answer to What spans the river?"),
            ("user", "And the valley?"),
        ]
        assert not first.ignore_eos and second.max_new_tokens == 9


class EchoContestant:
    """A peer that answers with the same two tokens and the end."""

    system, mode, processes = "peer", "plain", ()
    name, start_s = "peer plain", 0.0

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, stop_token_ids: Sequence[int]) -> Answer:
        self.prompts += map(tuple, prompts)
        return Answer(((65, 66, *stop_token_ids),) * len(prompts), 0.5, 3)


def test_a_peer_s_second_turn_follows_its_own_answer(questions: Path) -> None:
    tokenizer = load_tokenizer(TARGET)
    peer = EchoContestant()
    plan = ContestPlan(load_questions(questions, ("bridge",), 1), passes=1, tokens=9)
    run_contest(plan, [peer], tokenizer, Contest())
    first, second = (tokenizer.decode(ids) for ids in peer.prompts[-2:])
    assert "And the valley?" not in first
    assert second.index("What spans the river?") < second.index(tokenizer.decode((65, 66)))
    assert "And the valley?" in second
