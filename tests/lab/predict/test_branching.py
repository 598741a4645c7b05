"""Where draft and target part: figures by hand, and the command on table models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.models.tokenizer import TableTokenizer, load_tokenizer
from paceline_lab.plan.branches import as_json, write_branching
from paceline_lab.predict.branching import Branching, branching
from paceline_lab.predict.figures import RANKS
from paceline_lab.predict.positions import DrafterPositions, TargetPositions, TextPositions
from paceline_training.corpus import Role
from paceline_training.focus import read_focus
from paceline_training.text_kinds import TextKinds

BYTES = TableTokenizer(300, None)
FACTS = {"target": "<big>", "drafter": "small|one", "tokenizer": BYTES.fingerprint}
PROMPT = "Q"


def read(text: str, drafted: str, accepted: list[float], kl: list[float]) -> TextPositions:
    """A text behind a prompt of one byte: what the draft finds most probable, and how often it is accepted."""
    tokens = np.array(BYTES.encode(PROMPT + text), np.int32)
    count = len(text)
    places, own = np.arange(1, count + 1, dtype=np.int32), tokens[1:]
    tops = np.array(BYTES.encode(drafted), np.int32)
    half, nothing = np.full(count, 0.5), np.zeros(count, np.int32)
    reach = np.repeat(np.array(accepted)[:, None, None], RANKS, axis=2)
    target = TargetPositions(places, np.full(count, Role.ANSWER, np.int8), own, own, own, half, half, -half, half)
    chances = np.array(accepted)
    drafter = DrafterPositions(reach, nothing, nothing, tops, tops, half, chances, 1 - half, np.array(kl), half)
    return TextPositions(0.0, True, tokens, target, {"draft": drafter})


@pytest.fixture
def found() -> Branching:
    texts = [
        read("a 12", "a 13", [1.0, 0.9, 0.6, 0.2], [0.0, 0.1, 0.5, 2.0]),
        read("<|2", "<`3", [1.0, 0.3, 0.2], [0.0, 1.0, 4.0]),
    ]
    return branching(texts, "draft", TextKinds(BYTES))


def test_cells_add_up(found: Branching) -> None:
    assert found.whole.positions == 7
    assert found.whole.lost == pytest.approx(0.1 + 0.4 + 0.8 + 0.7 + 0.8)
    numbers = found.cells["text/number"]
    assert numbers.positions == 3
    assert numbers.lost == pytest.approx(0.4 + 0.8 + 0.8)
    assert numbers.tv == pytest.approx(0.5)
    assert numbers.kl == pytest.approx((0.5 + 2 + 4) / 3, abs=1e-4)
    assert [*found.cells] == ["text/number", "text/punctuation", "text/white space", "text/word inside"]
    assert sum(cell.lost for cell in found.cells.values()) == pytest.approx(found.whole.lost)


def test_choices_that_differ_are_counted_together(found: Branching) -> None:
    first, second = found.pairs
    assert (first.target, first.draft, first.positions, first.cell) == ("2", "3", 2, "text/number")
    assert first.lost == pytest.approx(1.6)
    assert (second.target, second.draft) == ("|", "`")
    assert second.lost == pytest.approx(0.7)


def test_places_are_told_dearest_first_with_what_stands_before(found: Branching) -> None:
    top, next_, third = found.points[:3]
    assert (top.number, top.place, top.before) == (1, 3, "Q<|")
    assert top.token.kl == pytest.approx(4.0)
    assert (next_.number, next_.place, next_.before) == (0, 4, "Qa 1"), "equal losses: the greater KL first"
    assert third.token.lost == pytest.approx(0.7)
    assert len(found.points) == 7
    assert [token.text for token in found.texts[1]] == ["<", "|", "2"]


def test_reports_show_a_model_s_text_as_it_is(found: Branching, tmp_path: Path) -> None:
    files = {file.suffix: file.read_text() for file in write_branching(tmp_path / "made", found, FACTS)}
    shown = re.findall(r'<span title="[^"]*" style="[^"]*,([^",]*)">([^<]*)</span>', files[".html"])
    assert shown[4:] == [("0.00)", "&lt;"), ("0.52)", "|"), ("0.60)", "2")]
    assert "<script" not in files[".html"]
    assert "| text/number | 3 | 2.000 | 71.4% | 66.7% | 0.500 | 2.167 |" in files[".md"]
    assert '| "\\|" | "\\`" | 1 | 0.700 | text/punctuation |' in files[".md"]
    assert json.loads(files[".json"]) == json.loads(json.dumps(as_json(found, FACTS)))
    assert json.loads(files[".json"])["cells"]["text/number"]["positions"] == 3


def test_the_command_writes_what_training_reads_and_does_not_read_twice(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "one"}\n{"prompt": "another"}\n')
    target, draft = "table:vocab=300,seed=1,max_length=96", "table:vocab=300,seed=1,noise=0.3,max_length=96"
    words = f"branches {target} --sample {data} --out {tmp_path / 'out'} --drafter {draft} --answer-tokens 12"
    once = CliRunner().invoke(app, words.split())
    assert once.exit_code == 0, once.output
    file = tmp_path / "out" / "branches.json"
    report = json.loads(file.read_text())
    assert report["whole"]["positions"] == sum(cell["positions"] for cell in report["cells"].values()) == 24
    assert 0 < report["whole"]["lost"] < 24
    assert read_focus(file, load_tokenizer(target))
    kept = sorted((tmp_path / "out" / "work").rglob("*.npz"))
    times = [each.stat().st_mtime_ns for each in kept]
    assert kept
    for more, code, named in (("", 2, "out"), (" --resume --seed 1", 2, "seed"), (" --resume", 0, "written")):
        again = CliRunner().invoke(app, f"{words}{more}".split())
        assert (again.exit_code, named in again.output) == (code, True), again.output
    assert [each.stat().st_mtime_ns for each in kept] == times
