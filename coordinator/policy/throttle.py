"""How freely all requests of a coordinator may draft, judged by what comes out: how fast they run at this load. Pure.

The policy's estimates are of one request; what drafting takes from all the others (a core that the
services share, a draft service in a queue) shows in all of them together alone. So their speed, tokens
over the milliseconds of all requests, is measured in windows, a mean for each level at each number of
running requests. The best level is used, drafts only where they bring a margin, and the others are looked at
again for a share of the time: what a look and the way there and back cost is made up for before the next.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum

from paceline.costs.running_mean import RunningMean

FEWEST_REQUESTS = 4
"""Fewer running requests than this are left to the policy: what pays depends on their texts, not on each other."""
WINDOW_ROUNDS = 32
"""Fewest rounds of a window; under load: so many for each running request."""
ROUNDS_PER_REQUEST = 8
SETTLING_ROUNDS = 2
"""Rounds of each request after a change that tell of neither what was nor what is: sessions open, and requests that
ran in step fall out of it and in again."""
FEWEST_ROUNDS = 3
"""Rounds of each request before a look at another level may end early."""
PROBE_SHARE = 0.01
"""Share of the time that looking at other levels may cost, once each has been looked at a few times."""
LEAST_PAUSE = 40.0
"""A look that cost nothing is followed by so many times as long at the best level: for some request it did."""
FIRST_LOOKS, FIRST_PAUSE = 2, 8.0
"""So many looks at a level are followed by no more than that, whatever they cost: one may have come at a bad time,
and would count for long."""
HOPELESS = 1.5
"""A look at another level ends early when it takes so many times as long as the best level would."""
MANY_ROUNDS = 1 << 20
"""Until requests come or go: as long as they differ nothing is looked at."""
REMEMBERED = 8.0
"""Windows that a mean remembers."""
MARGIN = 1.15
"""So much faster must all be where drafts are used: texts differ, and the unluckiest request loses that much."""


class Level(IntEnum):
    """What requests that follow the policy may use."""

    NONE = 0
    NGRAM = 1
    FULL = 2


@dataclass
class _LoadWindow:
    """What has run since requests of another kind or number came, or another level.

    `settling`: rounds still to come that may have begun before: they tell of neither. `looks`: whether they are on
    the way to another level or back. `request_ms` counts each millisecond once for each request that ran.
    """

    settling: int = 0
    looks: bool = False
    tokens: int = 0
    rounds: int = 0
    request_ms: float = 0.0

    @property
    def speed(self) -> float:
        return self.tokens / self.request_ms


@dataclass
class _LoadLevel:
    """What is known at one number of running requests, roughly."""

    speeds: dict[Level, RunningMean] = field(default_factory=dict)
    level: Level = Level.FULL
    best_ms: float = 0.0
    """Request time at the best level since the last look at another."""
    pause_ms: float = 0.0
    """So much of it must pass before the next."""
    turn: int = 0
    """Of the levels that are looked at in turn."""
    looks: Counter[Level] = field(default_factory=Counter)

    @property
    def left_ms(self) -> float:
        """Request time before another level may be looked at."""
        return self.pause_ms - self.best_ms

    def best(self) -> Level:
        """The level at which requests ran fastest so far; of equals, the freest."""
        return max(self.speeds, key=lambda level: (self._worth(level), level))

    def is_known(self) -> bool:
        """Whether every level has been looked at often enough."""
        return all(self.looks[level] >= FIRST_LOOKS for level in Level if level != self.best())

    def pause_for(self, window: _LoadWindow) -> float:
        """Request time at the best level that makes up for a window, by what it cost beyond that level."""
        best_ms = window.tokens / self.speeds[self.best()].value
        return max(0.0, window.request_ms - best_ms) / PROBE_SHARE

    def is_hopeless(self, measured: Level, window: _LoadWindow) -> bool:
        """Whether a look at a level has shown already that it is far behind."""
        if not self.speeds or measured == self.best():
            return False
        return window.tokens < self.speeds[self.best()].value * window.request_ms / HOPELESS

    def learn(self, measured: Level, window: _LoadWindow, *, whole: bool) -> None:
        """Take a window in and choose the level of the next.

        A look that ended early tells that a level is behind, not how far: whole ones take its place.
        """
        speed = self.speeds.setdefault(measured, RunningMean(window.speed, 0.0, limit=REMEMBERED))
        if whole:
            speed.add(window.speed)
        if measured != self.level:
            return
        if measured == self.best():
            self.best_ms += window.request_ms
        else:
            self._pause(measured, window)
        self.level = self._next_level()

    def _pause(self, looked_at: Level, window: _LoadWindow) -> None:
        self.looks[looked_at] += 1
        if self.looks[looked_at] <= FIRST_LOOKS:
            self.pause_ms += FIRST_PAUSE * window.request_ms
        else:
            self.pause_ms += max(LEAST_PAUSE * window.request_ms, self.pause_for(window))

    def _worth(self, level: Level) -> float:
        return self.speeds[level].value / (MARGIN if level is Level.FULL else 1.0)

    def _next_level(self) -> Level:
        """A level that was never seen, one that is due to be seen again, or the best."""
        unseen = [level for level in Level if level not in self.speeds]
        if unseen:
            return unseen[-1]
        if self.left_ms >= 0:
            return self.best()
        others = [level for level in Level if level != self.best()]
        self.turn += 1
        self.best_ms = self.pause_ms = 0.0
        return others[self.turn % len(others)]


class Throttle:
    """One per coordinator; times are the caller's clock, milliseconds."""

    def __init__(self) -> None:
        self._loads: dict[int, _LoadLevel] = {}
        self._running = self._free = self._off = 0
        self._window = _LoadWindow()
        self._latest = 0.0

    @property
    def level(self) -> Level:
        """What requests may use now."""
        return self._load().level if self._is_crowded else Level.FULL

    def enter(self, now: float, *, follows: bool, off: bool) -> None:
        """A request begins; `follows`: it leaves its drafting to the policy, `off`: it is target-only."""
        self._count(1, now, follows=follows, off=off)

    def leave(self, now: float, *, follows: bool, off: bool) -> None:
        """A request has ended."""
        self._count(-1, now, follows=follows, off=off)

    def add(self, committed: int, now: float) -> None:
        """Count a round of any request."""
        self._pass(now)
        window, measured = self._window, self._measured
        window.tokens += committed
        window.rounds += 1
        if measured is None or window.request_ms <= 0:
            return
        if window.settling:
            self._settle(window)
        elif (whole := window.rounds >= self._enough) or self._is_hopeless(window, measured):
            load = self._load()
            before = load.level
            load.learn(measured, window, whole=whole)
            self._window = _LoadWindow() if load.level == before else self._settling(looks=True)

    def forget(self, now: float) -> None:
        """What has run until now says nothing of the level in force."""
        self._pass(now)
        self._window = _LoadWindow(self._window.settling, self._window.looks)

    def rounds_left(self, now: float) -> int:
        """Rounds that each target-only request has before another level may be looked at, or this one was."""
        if self._measured is None:
            return MANY_ROUNDS
        self._pass(now)
        load, window = self._load(), self._window
        left = float(max(0, self._enough - window.rounds))
        if len(load.speeds) == len(Level) and load.level == load.best():
            left = max(left, (load.left_ms - window.request_ms) * load.speeds[load.level].value)
        return int(left / max(1, self._running))

    def _settling(self, *, looks: bool = False) -> _LoadWindow:
        return _LoadWindow(SETTLING_ROUNDS * self._running, looks)

    def _settle(self, window: _LoadWindow) -> None:
        window.settling -= 1
        if window.settling:
            return
        load = self._load()
        if window.looks and load.speeds and load.is_known():
            load.pause_ms += load.pause_for(window)
        self._window = _LoadWindow()

    def _is_hopeless(self, window: _LoadWindow, measured: Level) -> bool:
        return window.rounds >= FEWEST_ROUNDS * self._running and self._load().is_hopeless(measured, window)

    @property
    def _is_crowded(self) -> bool:
        """Whether requests share the target with so many others that what one costs is what the others lose."""
        return self._running >= FEWEST_REQUESTS

    @property
    def _enough(self) -> int:
        """Rounds of a whole window."""
        return max(WINDOW_ROUNDS, ROUNDS_PER_REQUEST * self._running)

    @property
    def _size(self) -> int:
        """Loads are told apart by powers of two, between which they change: limits often are such powers."""
        return round(math.log2(max(1, self._running)))

    @property
    def _measured(self) -> Level | None:
        """The level that the window tells of; None: requests are few, or differ."""
        if not self._is_crowded:
            return None
        if self._off == self._running:
            return Level.NONE
        return self._load().level if self._free == self._running else None

    def _load(self) -> _LoadLevel:
        """Of as many requests as run now; one that nothing is known of takes the best level of the nearest other."""
        size = self._size
        load = self._loads.setdefault(size, _LoadLevel())
        if not load.speeds:
            known = [other for other, each in self._loads.items() if each.speeds]
            nearest = min(known, key=lambda other: (abs(other - size), other), default=None)
            load.level = Level.FULL if nearest is None else self._loads[nearest].best()
        return load

    def _count(self, change: int, now: float, *, follows: bool, off: bool) -> None:
        self._pass(now)
        before = self._size, self._measured
        self._running += change
        self._free += change * (follows and not off)
        self._off += change * off
        if (self._size, self._measured) != before:
            self._window = self._settling()

    def _pass(self, now: float) -> None:
        self._window.request_ms += self._running * (now - self._latest)
        self._latest = now
