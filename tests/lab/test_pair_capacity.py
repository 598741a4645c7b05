"""The gain of drafts made elsewhere by hand, and threads that are kept on a core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.protocol.proposal import NONE
from paceline_lab.bench.pair_capacity import AHEAD, WAITED, CapacitySetting, keep_on, rows_of, settings_of
from tests.lab.made_stats import stats_of


def test_gain_and_formula_by_hand() -> None:
    speeds = {(NONE, False): (20.0, 20.0), (WAITED, False): (30.0, 40.0), (WAITED, True): (60.0, 80.0)}
    speeds |= {(AHEAD, False): (50.0, 50.0), (AHEAD, True): (50.0, 100.0)}
    served = {
        setting: [[stats_of(2, 2, tokens_per_second=each)] for each in speeds[setting.way, setting.elsewhere]]
        for setting in settings_of([2])
    }
    waited, ahead = rows_of(served)
    assert (waited.clients, waited.way, waited.plain) == (2, WAITED, [20.0, 20.0])
    assert waited.gain == pytest.approx(2) and ahead.gain == pytest.approx(1.5)
    assert ahead.row()["by turn"] == "1.00, 2.00"
    # Each round: a step of 10 ms for the target, 4 ms for two tokens of the draft.
    assert waited.claimed == ahead.claimed == pytest.approx(1 + 4 * 2 / 10)


def test_all_settings_are_served_at_each_number_of_clients() -> None:
    settings = settings_of([1, 4])
    assert len(settings) == len(set(settings)) == 2 * (1 + 2 * 2)
    assert CapacitySetting(4, AHEAD, elsewhere=True) in settings


def test_a_process_is_kept_on_one_core() -> None:
    code = "import threading; threading.Thread(target=input).start(); print(flush=True); threading.Event().wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            core = min(os.sched_getaffinity(0))
            keep_on(process.pid, core)
            threads = [int(each.name) for each in Path(f"/proc/{process.pid}/task").iterdir()]
            assert len(threads) == 2 and all(os.sched_getaffinity(each) == {core} for each in threads)
        finally:
            process.kill()
