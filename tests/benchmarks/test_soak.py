"""Nothing is left behind real services: cancels, a killed coordinator, a budget that holds a few sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import Found, Soak, run

TABLE = Soak("table:vocab=64,seed=1,step_ms=1,max_length=256,max_kv_rows=900", 75, 15, vocabulary=60)


def test_nothing_is_left_of_75_sessions(tmp_path: Path) -> None:
    found = run(TABLE, tmp_path)
    found.check()
    assert sum(found.outcomes.values()) == 75
    assert found.kills == 1
    assert {"finished", "cancelled", "PEER_UNAVAILABLE"} == set(found.outcomes)
    assert found.most_kv_rows > 0


def test_what_is_left_fails_the_check() -> None:
    fine = Found(max_kv_rows=10, most_kv_rows=10, sessions_left=0, kv_rows_left=0, queue_left=0)
    fine.check()
    wrongs: list[dict[str, Any]] = [
        {"sessions_left": 1},
        {"kv_rows_left": 1},
        {"queue_left": 1},
        {"most_kv_rows": 11},
    ]
    for wrong in wrongs:
        with pytest.raises(AssertionError):
            replace(fine, **wrong).check()
    with pytest.raises(AssertionError, match="grown by 5 bytes, planned 4"):
        replace(fine, resident_before=1, most_resident=6, allowed_growth=4).check()


@pytest.mark.full
@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_nothing_is_left_of_500_sessions_of_the_real_model(tmp_path: Path) -> None:
    found = run(Soak(), tmp_path)
    found.check()
    assert sum(found.outcomes.values()) == 500
    assert found.kills == 4
