"""Children of a process, waited for while signals raise."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from paceline.runtime.process import reap

WAIT_S = 20.0
SLEEPS = (sys.executable, "-c", "input()")


def interrupt_after(calls: int, of: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt as the C call of this number returns, where handlers of signals run, too.

    Returns whether there were so many calls.
    """
    left = calls

    def on_event(frame: FrameType, event: str, called: object) -> None:
        nonlocal left
        if event == "c_return" and called is not sys.setprofile:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    sys.setprofile(on_event)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            of()
    finally:
        sys.setprofile(None)
    return left <= 0


def in_time(call: Callable[[], object]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return not thread.is_alive()


@pytest.mark.parametrize("timeout_s", [0.0, 0.01])
def test_a_child_is_reaped_after_an_interrupt_wherever_it_came(timeout_s: float) -> None:
    with subprocess.Popen(SLEEPS, stdin=subprocess.PIPE) as child:
        calls = 1
        while interrupt_after(calls, lambda: reap(child, timeout_s)):
            assert in_time(lambda: reap(child)), f"call {calls}"
            calls += 1
        assert calls > 3
        child.kill()
        assert reap(child, WAIT_S) == -signal.SIGKILL


def test_a_child_reaped_by_somebody_else_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert reap(child, WAIT_S) == 3
    assert (reap(child), child.wait()) == (3, 3)
    child.returncode = None
    assert reap(child) == 0, "as Popen says of a status that nobody has"
