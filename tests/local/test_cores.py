"""Dividing the cores: a table of machines and drafts, and what `--cores` may say."""

from __future__ import annotations

import pytest

from paceline.costs.cost_line import CostLine
from paceline.local.cores import (
    LONGEST_CHAIN,
    Cores,
    MeasuredDivision,
    by_rule,
    candidates,
    choose,
    explain,
    weigh,
)
from paceline.local.settings import ServeSettings, check_settings
from paceline.protocol.errors import InvalidInput

TARGET_MS = 240.0
MODEL = "table:vocab=300,seed=1"


def step(threads: int, ms: float, serial: float, rows: int, growth: float) -> CostLine:
    """A step of which the share `serial` doesn't gain from threads; `growth`: what so many rows take over one."""
    one = ms * (serial + (1 - serial) / threads)
    return CostLine(((1, one), (rows, one * growth)))


def machine(
    total: int, draft_ms: float, *, serial: float = 0.1, slowdown: float | None = None
) -> tuple[MeasuredDivision, ...]:
    """Every candidate of a machine.

    Args:
        total: its cores.
        draft_ms: a draft's step on one thread; the target's takes `TARGET_MS`.
        serial: share of the target's step that doesn't gain from threads, as where memory is its limit.
        slowdown: of both while both work; None: by how many threads there are for a core.
    """
    found = []
    for cores in candidates(total):
        crowd = max(1.0, (cores.target + cores.draft) / total) if slowdown is None else slowdown
        target = step(cores.target, TARGET_MS, serial, 5, 1.1)
        draft = step(cores.draft, draft_ms, 0.9, 4, 1.1)
        found.append(MeasuredDivision(cores, target, draft, crowd, crowd))
    return tuple(found)


@pytest.mark.parametrize(
    ("total", "draft_ms", "serial", "cores"),
    [
        (2, 40, 0.1, Cores(2, 1)),  # half of the target's cores is too much for a draft
        (3, 40, 0.1, Cores(3, 1)),
        (8, 40, 0.1, Cores(8, 1)),
        (2, 40, 0.97, Cores(1, 1)),  # memory bounds the target: its second core brings nothing
        (2, 40, 0.8, Cores(2, 1)),  # without drafts it would be a tenth slower
        (4, 40, 0.9, Cores(3, 1)),
        (16, 40, 0.9, Cores(15, 1)),
        (2, 2, 0.1, Cores(2, 1)),  # so cheap a draft is waited for, whatever there is
        (4, 2, 0.1, Cores(4, 1)),
        (16, 2, 0.1, Cores(16, 1)),
        (2, 400, 0.1, Cores(2, 1)),  # hopeless: the target loses nothing
        (4, 400, 0.1, Cores(4, 1)),
        (16, 400, 0.9, Cores(16, 1)),
    ],
)
def test_a_draft_gets_cores_of_its_own_where_they_bring_more_than_the_target_loses(
    total: int, draft_ms: float, serial: float, cores: Cores
) -> None:
    assert choose(machine(total, draft_ms, serial=serial)).cores == cores


def test_a_draft_that_gains_from_threads_gets_them() -> None:
    def division(threads: int, draft_ms: float) -> MeasuredDivision:
        return MeasuredDivision(Cores(2, threads), CostLine(((1, 100.0),)), CostLine(((1, draft_ms),)), 2.0, 2.0)

    assert choose((division(1, 20.0), division(2, 10.0))).cores == Cores(2, 2)
    assert choose((division(1, 20.0), division(2, 19.0))).cores == Cores(2, 1), "as good as alike"


def test_a_target_that_is_slowed_by_its_draft_waits_for_it_instead() -> None:
    free, disturbed = (machine(2, 30, serial=0.9, slowdown=slowdown)[0] for slowdown in (1.0, 4.0))
    assert weigh(free).how.endswith("drafted ahead")
    assert weigh(disturbed).how.endswith("waited for")
    assert weigh(disturbed).tokens_per_s < weigh(free).tokens_per_s


def test_what_a_division_is_worth_is_the_closed_form() -> None:
    ahead = MeasuredDivision(Cores(3, 1), CostLine(((1, 100.0),)), CostLine(((1, 10.0),)))
    # Eight tokens take 80 ms, which the target's 100 hide in 80 % of the rounds.
    committed = (1 - 0.7 ** (LONGEST_CHAIN + 1)) / 0.3
    assert weigh(ahead).tokens_per_s == pytest.approx(1000 * committed / (100 + 0.2 * 80))
    hopeless = MeasuredDivision(Cores(4, 1), CostLine(((1, 50.0), (5, 500.0))), CostLine(((1, 60.0),)))
    assert weigh(hopeless).tokens_per_s == pytest.approx(20.0)
    assert weigh(hopeless).how == "target-only"


@pytest.mark.parametrize("total", range(1, 17))
def test_candidates_leave_the_target_most_and_begin_with_the_rule(total: int) -> None:
    found = candidates(total)
    assert found[0] == by_rule(total, drafts=True)
    assert len(set(found)) == len(found) <= 2 * total.bit_length()
    assert all(1 <= each.draft <= total for each in found)
    assert all(each.target == total or each.target == total - each.draft >= each.draft for each in found)


def test_the_explanation_has_a_line_for_each_division_and_names_the_chosen_one() -> None:
    measured = machine(2, 40)
    lines = explain(measured, choose(measured), 2)
    assert [line.partition(":")[0] for line in lines[:-1]] == [
        "target 2 + draft 1 shared",
        "target 2 + draft 2 shared",
        "target 1 + draft 1 apart",
    ]
    assert lines[-1].startswith("chosen: target 2 + draft 1 shared (at 70% ")
    assert all("tokens/s" in line and " ms" in line for line in lines[:-1])


@pytest.mark.parametrize(("text", "cores"), [("target=2,draft=1", Cores(2, 1)), ("target=16", Cores(16, 0))])
def test_cores_are_read(text: str, cores: Cores) -> None:
    assert Cores.parse(text) == cores


@pytest.mark.parametrize("text", ["", "2,1", "target=two", "draft=1,target=2", "target=2,draft=", "target=-1"])
def test_cores_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^cores = '.*': must be target=N or target=N,draft=M$"):
        ServeSettings(model=MODEL, cores=text)


@pytest.mark.parametrize(
    ("text", "drafter", "named"),
    [
        ("target=3,draft=1", f"model:{MODEL}", "cores target = 3: must be in [1, 2]"),
        ("target=0,draft=1", f"model:{MODEL}", "cores target = 0: must be in [1, 2]"),
        ("target=2,draft=4", f"model:{MODEL}", "cores draft = 4: must be in [1, 2]"),
        ("target=2", f"model:{MODEL}", "cores draft = 0: must be in [1, 2]"),
        ("target=2,draft=1", "ngram", "cores draft = 1: must be left out"),
    ],
)
def test_cores_that_the_machine_or_the_services_lack_are_refused(
    text: str, drafter: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.local.settings.available_cores", lambda environment: 2)
    with pytest.raises(InvalidInput) as refused:
        check_settings(ServeSettings(model=MODEL, drafter=drafter, cores=text))
    assert refused.value.message.startswith(named)
