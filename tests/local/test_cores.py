"""Dividing the cores: the rule, and what `--cores` may say."""

from __future__ import annotations

import pytest

from paceline.local.settings import Cores, ServeSettings, by_rule, check_settings
from paceline.protocol.errors import InvalidInput

MODEL = "table:vocab=300,seed=1"


@pytest.mark.parametrize("total", [1, 2, 16])
def test_the_target_has_every_core_and_its_draft_one(total: int) -> None:
    assert by_rule(total, drafts=True) == Cores(total, 1)
    assert by_rule(total, drafts=False) == Cores(total, 0)


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
