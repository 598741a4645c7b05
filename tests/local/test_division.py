"""Measuring, keeping what was measured, and starting without it: real processes, table models."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.costs.cost_line import CostLine
from paceline.local import division, step_meter
from paceline.local.cores import Cores, MeasuredDivision, candidates
from paceline.local.division import divide
from paceline.local.machine_use import UseByOthers
from paceline.local.service_process import write_config
from paceline.local.settings import ServeSettings, draft_flags, target_flags
from paceline.local.step_cache import cache_file, keep_times, measured_for, read_times
from paceline.local.step_meter import MeasuringFailed, measure, open_meters
from paceline.runtime.config import DraftConfig, TargetConfig, load_config

TARGET = "table:vocab=300,seed=1,step_ms=8,row_ms=4"
DRAFT = "table:vocab=300,seed=1,noise=0.2,step_ms=2"
LINE = CostLine(((1, 10.0), (5, 12.0)))
SLOW = CostLine(((1, 20.0), (5, 24.0)))
MEASURED = (MeasuredDivision(Cores(2, 1), LINE, LINE, 1.5, 1.25), MeasuredDivision(Cores(1, 1), SLOW, LINE))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that stands for a model: nothing loads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_text("w")
    return folder


def serving(model: str | Path, draft: str = DRAFT, **changes: Any) -> ServeSettings:
    return ServeSettings(model=str(model), drafter=f"model:{draft}", **changes)


def key_of(settings: ServeSettings, total: int = 2) -> dict[str, Any]:
    target = load_config(TargetConfig, None, target_flags(settings, total))
    return measured_for(target, load_config(DraftConfig, None, draft_flags(settings, total)), total)


def configured(folder: Path, settings: ServeSettings) -> tuple[Path, Path]:
    files = folder / "target.toml", folder / "draft.toml"
    write_config(TargetConfig, files[0], target_flags(settings, 2))
    write_config(DraftConfig, files[1], draft_flags(settings, 2))
    return files


def divided(
    settings: ServeSettings, folder: Path, total: int = 2, *, measures: bool = True
) -> tuple[Cores, list[str]]:
    lines: list[str] = []
    return divide(settings, total, folder, lines.append, measures=measures), lines


def test_processes_say_what_their_models_steps_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_meter, "SECONDS", 0.05)
    monkeypatch.setattr(step_meter, "OTHERS_SHARE", 1.0)
    with open_meters(*configured(tmp_path, serving(TARGET)), 2) as meters:
        found = measure(*meters, candidates(2))
    assert [each.cores for each in found] == [Cores(2, 1), Cores(2, 2), Cores(1, 1)]
    for each in found:
        assert 12 <= each.target.ms(1) < 28 <= each.target.ms(5), "8 ms and 4 for each row"
        assert 2 <= each.draft.ms(1) < 12
        assert each.target_slowdown >= 1
        assert each.draft_slowdown >= 1


def test_a_machine_that_others_use_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_meter, "PASSES", 1)
    monkeypatch.setattr(step_meter, "SECONDS", 0.05)
    monkeypatch.setattr(step_meter, "OTHERS_SHARE", -1.0)
    with (
        pytest.raises(MeasuringFailed, match=r"^other programs used \d+% of the cores"),
        open_meters(*configured(tmp_path, serving(TARGET)), 2) as meters,
    ):
        measure(*meters, (Cores(2, 1),))


def test_use_by_others_is_what_the_named_processes_have_not_used() -> None:
    others, everyone = UseByOthers((os.getpid(),)), UseByOthers(())
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    assert everyone.share() - others.share() > 0.1 * 0.3 / len(os.sched_getaffinity(0))
    assert 0 <= others.share() <= everyone.share() <= 1


def test_what_was_measured_is_kept_and_needs_no_process_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = serving(model)
    keep_times(key_of(settings), MEASURED)
    monkeypatch.setattr(division, "open_meters", None)
    cores, lines = divided(settings, tmp_path)
    assert cores == Cores(2, 1)
    assert str(cache_file(key_of(settings))) in lines[0]
    assert lines[-1].startswith("chosen: target 2 + draft 1 shared")


def change_weights(model: Path) -> None:
    (model / "weights").write_text("ww")


def change_time(model: Path) -> None:
    os.utime(model / "weights", (1, 1))


@pytest.mark.parametrize("change", [change_weights, change_time])
def test_what_was_measured_of_other_files_is_not_used(model: Path, change: Callable[[Path], None]) -> None:
    settings = serving(model)
    keep_times(key_of(settings), MEASURED)
    assert read_times(key_of(settings)) == MEASURED
    change(model)
    assert read_times(key_of(settings)) == ()


@pytest.mark.parametrize(
    ("changes", "total"),
    [({"dtype": "bfloat16"}, 2), ({"drafter": f"model:{TARGET}"}, 2), ({"max_model_len": 64}, 2), ({}, 4)],
    ids=["dtype", "draft", "length", "cores"],
)
def test_what_was_measured_with_other_settings_is_not_used(model: Path, changes: dict[str, Any], total: int) -> None:
    keep_times(key_of(serving(model)), MEASURED)
    other = ServeSettings(**{"model": str(model), "drafter": f"model:{DRAFT}"} | changes)
    assert read_times(key_of(other, total)) == ()


def test_another_processor_is_measured_anew(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = serving(model)
    keep_times(key_of(settings), MEASURED)
    monkeypatch.setattr("paceline.local.step_cache.processor_name", lambda: "another")
    assert read_times(key_of(settings)) == ()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"target_slowdown"', '"slowdown"'),
        lambda text: text.replace("10.0", "-1"),
    ],
    ids=["truncated", "another kind", "a name", "a number"],
)
def test_damaged_times_are_measured_again(model: Path, damage: Callable[[str], str]) -> None:
    key = key_of(serving(model))
    keep_times(key, MEASURED)
    cache_file(key).write_text(damage(cache_file(key).read_text()))
    assert read_times(key) == ()


def test_times_that_cannot_be_written_are_no_failure(model: Path, home: Path) -> None:
    home.write_text("no folder")
    keep_times(key_of(serving(model)), MEASURED)
    assert read_times(key_of(serving(model))) == ()


def test_a_model_that_cannot_be_loaded_leaves_the_rule(model: Path, tmp_path: Path) -> None:
    cores, lines = divided(serving(model), tmp_path)
    assert cores == Cores(2, 1)
    assert lines[0].startswith("measuring the steps of both models")
    assert lines[1].startswith("target 2 + draft 1 shared, by rule: the target's steps could not be measured: ")
    assert "model = 'model'" in lines[1], "why"
    assert read_times(key_of(serving(model))) == ()


def test_measuring_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_meter, "LONGEST_S", 0.05)
    with pytest.raises(MeasuringFailed), open_meters(*configured(tmp_path, serving(TARGET)), 2) as meters:
        measure(*meters, candidates(2))


def test_a_process_that_dies_while_it_measures_is_named(tmp_path: Path) -> None:
    with open_meters(*configured(tmp_path, serving(TARGET)), 2) as (target, draft):
        assert (target.answer(), draft.answer()) == (0, 0)
        draft.kill()
        with pytest.raises(MeasuringFailed, match="the draft's steps could not be measured"):
            draft.alone_ms(1, 1)
        assert target.alone_ms(1, 1) > 8


def test_without_leave_to_measure_the_rule_holds(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "open_meters", None)
    cores, (line,) = divided(serving(model), tmp_path, measures=False)
    assert cores == Cores(2, 1)
    assert "have not been measured on this machine" in line


@pytest.mark.parametrize(
    ("settings", "total", "cores"),
    [
        (serving("some/model"), 1, Cores(1, 1)),
        (serving(TARGET), 8, Cores(8, 1)),
        (serving("some/model", tensor_parallel_size=2), 8, Cores(8, 1)),
        (serving("some/model", cores="target=5,draft=2"), 8, Cores(5, 2)),
    ],
    ids=["one core", "table", "ranks", "told"],
)
def test_where_there_is_nothing_to_measure_nothing_is(
    settings: ServeSettings, total: int, cores: Cores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "open_meters", None)
    found, (line,) = divided(settings, tmp_path, total)
    assert found == cores
    assert line.startswith(cores.says(total))


def test_without_a_draft_there_is_nothing_to_divide_or_say(tmp_path: Path) -> None:
    assert divided(ServeSettings(model=TARGET, drafter="ngram"), tmp_path, 8) == (Cores(8, 0), [])


def test_the_kept_file_says_what_it_is_of(model: Path) -> None:
    key = key_of(serving(model))
    keep_times(key, (replace(MEASURED[0], target_slowdown=2.0),))
    held = json.loads(cache_file(key).read_text())
    assert held["key"]["target"]["name"] == "model"
    assert held["divisions"][0]["target_slowdown"] == 2.0
