"""How freely all requests of a coordinator may draft, judged by what comes out: tokens a second at this load. Pure.

The policy's estimates are of one request; what drafting takes from all the others (a core that the
services share, a draft service in a queue) shows in the sum alone. So the sum is measured in windows,
a mean for each level at each number of running requests; the best level is used, and the others are
looked at again within `PROBE_SHARE` of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from coordinator.estimates import Mean

FEWEST_REQUESTS = 4
"""Fewer running requests than this are left to the policy: what pays depends on their texts, not on each other."""
WINDOW_ROUNDS = 32
"""Fewest rounds of a window; under load: so many for each running request."""
ROUNDS_PER_REQUEST = 3
PROBE_SHARE = 0.01
"""Share of the time that looking at other levels may cost, once each has been looked at."""
LEAST_PAUSE = 10.0
"""A look that cost nothing is followed by so many times as long at the best level."""
HOPELESS = 1.5
"""A look at another level ends early when it takes so many times as long as the best level would."""
MANY_ROUNDS = 1 << 20
"""Until requests come or go: as long as they differ nothing is looked at."""
REMEMBERED = 8.0
"""Windows that a mean remembers."""


class Level(IntEnum):
    """What requests that follow the policy may use."""

    NONE = 0
    NGRAM = 1
    FULL = 2


@dataclass
class _Load:
    """What is known at one number of running requests, roughly."""

    rates: dict[Level, Mean] = field(default_factory=dict)
    level: Level = Level.FULL
    best_ms: float = 0.0
    """Time at the best level since the last look at another."""
    pause_ms: float = 0.0
    """So much of it must pass before the next."""
    looks: int = 0

    def best(self) -> Level:
        """The level with most tokens a second so far; of equals, the freest."""
        return max(self.rates, key=lambda level: (self.rates[level].value, level))

    def pause_for(self, tokens: int, elapsed: float) -> float:
        """Milliseconds at the best level that make up for a window, by what it cost beyond that level."""
        if not self.rates:
            return 0.0
        return max(0.0, elapsed - tokens / self.rates[self.best()].value) / PROBE_SHARE


class Throttle:
    """One per coordinator; times are the caller's clock, milliseconds."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._running = self._free = self._off = 0
        self._settling = 0
        """Rounds still to come that may have begun before the last change of level."""
        self._began: float | None = None
        self._tokens = self._rounds = 0

    @property
    def level(self) -> Level:
        """What requests may use now."""
        return self._load().level if self.crowded else Level.FULL

    @property
    def crowded(self) -> bool:
        """Whether requests share the target with so many others that what one costs is what the others lose."""
        return self._running >= FEWEST_REQUESTS

    def enter(self, now: float, *, follows: bool, off: bool) -> None:
        """A request begins; `follows`: it leaves its drafting to the policy, `off`: it is target-only."""
        self._count(1, follows=follows, off=off)
        self._restart(now)

    def leave(self, now: float, *, follows: bool, off: bool) -> None:
        """A request has ended."""
        self._count(-1, follows=follows, off=off)
        self._restart(now)

    def add(self, committed: int, now: float) -> None:
        """Count a round of any request."""
        if not self.crowded:
            return
        if self._began is None:
            self._restart(now)
            return
        self._tokens += committed
        self._rounds += 1
        elapsed = now - self._began
        measured = self._measured_level()
        if measured is None or elapsed <= 0:
            return
        load = self._load()
        if self._settling:
            self._settle(load, elapsed, now)
            return
        if self._rounds >= self._window or self._is_hopeless(load, measured, elapsed):
            self._close(load, measured, elapsed)
            self._restart(now)

    def forget(self, now: float) -> None:
        """What has run until now says nothing of the level in force."""
        self._restart(now)

    def rounds_left(self, now: float) -> int:
        """Rounds that each target-only request has before another level may be looked at, or this one was."""
        if self._measured_level() is None:
            return MANY_ROUNDS
        load = self._load()
        left = float(max(0, self._window - self._rounds))
        if self._began is not None and len(load.rates) == len(Level) and load.level == load.best():
            ms = load.pause_ms - load.best_ms - (now - self._began)
            left = max(left, ms * load.rates[load.level].value)
        return int(left / max(1, self._running))

    @property
    def _window(self) -> int:
        """Rounds of a window."""
        return max(WINDOW_ROUNDS, ROUNDS_PER_REQUEST * self._running)

    def _count(self, change: int, *, follows: bool, off: bool) -> None:
        self._running += change
        self._free += change * (follows and not off)
        self._off += change * off

    def _load(self) -> _Load:
        """Loads are told apart by powers of two; one that nothing is known of takes the best of the nearest other."""
        size = self._running.bit_length()
        load = self._loads.setdefault(size, _Load())
        if not load.rates:
            known = [other for other, each in self._loads.items() if each.rates]
            nearest = min(known, key=lambda other: (abs(other - size), other), default=None)
            load.level = Level.FULL if nearest is None else self._loads[nearest].best()
        return load

    def _measured_level(self) -> Level | None:
        """The level that this window tells of; None: requests differ."""
        if self._off == self._running:
            return Level.NONE
        return self._load().level if self._free == self._running else None

    def _is_hopeless(self, load: _Load, measured: Level, elapsed: float) -> bool:
        best = load.rates.get(load.best()) if load.rates else None
        if best is None or measured == load.best() or self._rounds < self._running:
            return False
        return self._tokens < best.value * elapsed / HOPELESS and elapsed > WINDOW_ROUNDS / 4 / best.value

    def _settle(self, load: _Load, elapsed: float, now: float) -> None:
        """The first round of each request after a change of level tells of neither; what it cost, the look cost."""
        self._settling -= 1
        if not self._settling:
            load.pause_ms += load.pause_for(self._tokens, elapsed)
            self._restart(now)

    def _close(self, load: _Load, measured: Level, elapsed: float) -> None:
        rate = self._tokens / elapsed
        load.rates.setdefault(measured, Mean(rate, 0.0, limit=REMEMBERED)).add(rate)
        if measured != load.level:
            return
        if measured == load.best():
            load.best_ms += elapsed
        else:
            load.pause_ms += max(LEAST_PAUSE * elapsed, load.pause_for(self._tokens, elapsed))
        load.level = self._next_level(load)
        if load.level != measured:
            self._settling = self._running

    def _next_level(self, load: _Load) -> Level:
        """A level that was never seen, one that is due to be seen again, or the best."""
        unseen = [level for level in Level if level not in load.rates]
        if unseen:
            return unseen[-1]
        if load.best_ms <= load.pause_ms:
            return load.best()
        others = [level for level in Level if level != load.best()]
        load.looks += 1
        load.best_ms = load.pause_ms = 0.0
        return others[load.looks % len(others)]

    def _restart(self, now: float) -> None:
        self._began = now if self._running else None
        self._tokens = self._rounds = 0
