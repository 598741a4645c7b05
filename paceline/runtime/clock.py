"""The clock by which services wait and measure: the machine's, or that of a simulation they run in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_read: Callable[[], float] = time.monotonic


def now() -> float:
    """Return seconds since a fixed moment; never less than before."""
    return _read()


@contextmanager
def running_on(read: Callable[[], float]) -> Iterator[None]:
    """Have `now` return what `read` does, in the whole process, while the context is open."""
    global _read
    before, _read = _read, read
    try:
        yield
    finally:
        _read = before
