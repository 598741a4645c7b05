"""How freely the requests of a coordinator may draft, judged by how fast all of them run together at this load. Pure.

The policy's estimates are of one request. What its drafting takes from the others (a core that the
services share, a place in the draft service's queue) shows only in all of them together. So their speed,
tokens over the milliseconds of all requests, is measured in windows: a mean for each level at each number
of running requests. The best level is used, with drafts only where they bring a margin. The other levels
are tried again for a share of the time: what a trial and the changes to it and back cost is made up for
before the next.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum

from paceline.costs.running_mean import RunningMean

FEWEST_REQUESTS = 4
"""With fewer running requests the policy alone decides: what pays then depends on their texts, not on each other."""
WINDOW_ROUNDS = 32
"""Fewest rounds of a window."""
ROUNDS_PER_REQUEST = 8
"""Fewest rounds of a window for each running request."""
SETTLING_ROUNDS = 2
"""Rounds of each request after a change that are not measured: sessions open, and requests that shared steps stop
doing so for a while."""
FEWEST_ROUNDS = 3
"""Rounds of each request before the trial of another level may end early."""
PROBE_SHARE = 0.01
"""Share of the time that trials of other levels may cost, once each has been tried a few times."""
LEAST_PAUSE = 40.0
"""Even a trial that cost nothing is followed by this many times as long at the best level: it cost some request."""
FIRST_TRIALS, FIRST_PAUSE = 2, 8.0
"""The first trials of a level are followed by no more than this many times as long, whatever they cost: one may have
come at a bad time, and would count for long."""
HOPELESS = 1.5
"""The trial of another level ends early when it takes this many times as long as the best level would."""
MANY_ROUNDS = 1 << 20
"""Until requests come or go: as long as they differ nothing is tried."""
REMEMBERED = 8.0
"""Windows that a mean remembers."""
MARGIN = 1.15
"""Drafting is enabled only if aggregate throughput improves by this factor: texts differ, and the unluckiest request
loses that much."""


class Level(IntEnum):
    """What requests that follow the policy may use."""

    NONE = 0
    NGRAM = 1
    FULL = 2


@dataclass
class _LoadWindow:
    """What has run since the number or kind of requests changed, or the level.

    `settling`: rounds still to come that are not measured, since they may have begun before. `trial`: whether the
    change was to try another level, or back. `request_ms` counts each millisecond once for each running request.
    """

    settling: int = 0
    trial: bool = False
    tokens: int = 0
    rounds: int = 0
    request_ms: float = 0.0

    @property
    def speed(self) -> float:
        return self.tokens / self.request_ms


@dataclass
class _LoadLevel:
    """What is known of about one number of running requests."""

    speeds: dict[Level, RunningMean] = field(default_factory=dict)
    level: Level = Level.FULL
    best_ms: float = 0.0
    """Request time at the best level since the last trial of another."""
    pause_ms: float = 0.0
    """Request time at the best level before the next trial."""
    trials: Counter[Level] = field(default_factory=Counter)
    """Of each level."""
    turn: int = 0
    """How many trials were chosen: the other levels are tried in turn."""

    @property
    def left_ms(self) -> float:
        """Request time before another level may be tried."""
        return self.pause_ms - self.best_ms

    def best(self) -> Level:
        """The level at which requests ran fastest so far; of equals, the one that allows most."""
        return max(self.speeds, key=lambda level: (self._worth(level), level))

    def is_known(self) -> bool:
        """Whether every other level has been tried often enough."""
        return all(self.trials[level] >= FIRST_TRIALS for level in Level if level != self.best())

    def pause_for(self, window: _LoadWindow) -> float:
        """Request time at the best level that makes up for a window, by what it cost beyond that level."""
        best_ms = window.tokens / self.speeds[self.best()].value
        return max(0.0, window.request_ms - best_ms) / PROBE_SHARE

    def is_hopeless(self, measured: Level, window: _LoadWindow) -> bool:
        """Whether a trial has shown already that its level is far behind."""
        if not self.speeds or measured == self.best():
            return False
        return window.tokens < self.speeds[self.best()].value * window.request_ms / HOPELESS

    def learn(self, measured: Level, window: _LoadWindow, *, whole: bool) -> None:
        """Take a window in and choose the level of the next.

        A trial that ended early tells that its level is behind, but not how far: a whole one replaces its speed.
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

    def _pause(self, tried: Level, window: _LoadWindow) -> None:
        self.trials[tried] += 1
        if self.trials[tried] <= FIRST_TRIALS:
            self.pause_ms += FIRST_PAUSE * window.request_ms
        else:
            self.pause_ms += max(LEAST_PAUSE * window.request_ms, self.pause_for(window))

    def _worth(self, level: Level) -> float:
        return self.speeds[level].value / (MARGIN if level is Level.FULL else 1.0)

    def _next_level(self) -> Level:
        """A level that was never tried, one that is due to be tried again, or the best."""
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
        """A request begins; `follows`: the policy decides its drafting, `off`: it is target-only."""
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
            self._window = _LoadWindow() if load.level == before else self._settling(trial=True)

    def forget(self, now: float) -> None:
        """Discard what has run until now: it does not show the current level."""
        self._pass(now)
        self._window = _LoadWindow(self._window.settling, self._window.trial)

    def rounds_left(self, now: float) -> int:
        """Rounds that each target-only request has until another level may be tried, or this trial ends."""
        if self._measured is None:
            return MANY_ROUNDS
        self._pass(now)
        load, window = self._load(), self._window
        left = float(max(0, self._enough - window.rounds))
        if len(load.speeds) == len(Level) and load.level == load.best():
            left = max(left, (load.left_ms - window.request_ms) * load.speeds[load.level].value)
        return int(left / max(1, self._running))

    def _settling(self, *, trial: bool = False) -> _LoadWindow:
        return _LoadWindow(SETTLING_ROUNDS * self._running, trial)

    def _settle(self, window: _LoadWindow) -> None:
        window.settling -= 1
        if window.settling:
            return
        load = self._load()
        if window.trial and load.speeds and load.is_known():
            load.pause_ms += load.pause_for(window)
        self._window = _LoadWindow()

    def _is_hopeless(self, window: _LoadWindow, measured: Level) -> bool:
        return window.rounds >= FEWEST_ROUNDS * self._running and self._load().is_hopeless(measured, window)

    @property
    def _is_crowded(self) -> bool:
        """Whether so many requests share the target that what one costs is lost to the others."""
        return self._running >= FEWEST_REQUESTS

    @property
    def _enough(self) -> int:
        """Rounds of a whole window."""
        return max(WINDOW_ROUNDS, ROUNDS_PER_REQUEST * self._running)

    @property
    def _size(self) -> int:
        """Loads are told apart by powers of two, and change halfway between them: limits often are such powers."""
        return round(math.log2(max(1, self._running)))

    @property
    def _measured(self) -> Level | None:
        """The level that the window measures; None: requests are few, or differ."""
        if not self._is_crowded:
            return None
        if self._off == self._running:
            return Level.NONE
        return self._load().level if self._free == self._running else None

    def _load(self) -> _LoadLevel:
        """The load of as many requests as run now; a new one starts at the best level of the nearest known one."""
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
