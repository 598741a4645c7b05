"""Faults for somebody's own deployment: what may be done to it, and the plan that a seed makes of that."""

from __future__ import annotations

import itertools
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from string import Formatter

from paceline.chaos.blows import Blow, Moment
from paceline.chaos.proxy import Address
from paceline.chaos.states import State
from paceline.protocol.errors import InvalidInput, require

CLIENT = "coordinator"
"""The proxy before the coordinator, through which this program's own requests go."""
_IN_PATH = re.compile(r"(target|draft)@([^=\s]+):(\d{1,5})=([^=\s]+):(\d{1,5})")
_STATES: Mapping[str, tuple[State, ...]] = {
    "target": (State.SEND, State.VERDICT, State.RUN, State.PREFETCH, State.STOP),
    "draft": (State.DRAFTING, State.PROPOSAL, State.COMMIT, State.STOP),
    CLIENT: (State.REQUEST, State.TEXT, State.STOP),
}
_BLOWS: Mapping[str, tuple[Blow, ...]] = {
    "target": (Blow.CUT, Blow.TRUNCATE, Blow.CORRUPT, Blow.DUPLICATE, Blow.DELAY, Blow.HOLD, Blow.SLOW),
    "draft": (Blow.CUT, Blow.TRUNCATE, Blow.CORRUPT, Blow.DUPLICATE, Blow.DELAY, Blow.HOLD, Blow.SLOW, Blow.LIE),
    CLIENT: (Blow.CUT, Blow.TRUNCATE, Blow.DELAY, Blow.HOLD, Blow.SLOW),
}
_OPAQUE = (Blow.CUT, Blow.TRUNCATE, Blow.DELAY, Blow.HOLD, Blow.SLOW)
"""What needs no frame: under TLS there are none to be seen."""
SECONDS = (0.05, 0.5, 2.0)


class Act(Enum):
    """What isn't a blow on a connection."""

    COMMAND = "command"
    LEAVE = "client leaves"
    SLOW_READER = "slow reader"


@dataclass(frozen=True)
class InPath:
    """A proxy that somebody has put between a coordinator and one of its peers."""

    role: str
    listen: Address
    upstream: Address

    @classmethod
    def parse(cls, text: str) -> InPath:
        """Read ROLE@HOST:PORT=HOST:PORT.

        Raises:
            InvalidInput: it is something else.
        """
        found = _IN_PATH.fullmatch(text)
        if found is None:
            raise InvalidInput.of("proxy", text, "target@HOST:PORT=HOST:PORT or draft@HOST:PORT=HOST:PORT")
        role, host, port, upstream, upstream_port = found.groups()
        return cls(role, (host, int(port)), (upstream, int(upstream_port)))

    @property
    def label(self) -> str:
        """What plans and reports call it."""
        return f"{self.role} {self.upstream[0]}:{self.upstream[1]}"


@dataclass(frozen=True)
class Operation:
    """All that may be done: proxies in the path, commands, and whether connections are under TLS."""

    proxies: tuple[InPath, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    tls: bool = False


@dataclass(frozen=True)
class OperatorFault:
    """One fault. `label` says before whom its frame passes."""

    seed: int
    kind: Blow | Act
    label: str
    state: State
    moment: Moment
    skip: int
    seconds: float
    byte: int
    command: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """For people."""
        if self.kind in (Act.LEAVE, Act.SLOW_READER):
            return str(self.kind.value)
        what = f"run `{shlex.join(self.command)}`" if self.command else self.kind.value
        lasting = self.kind in (Blow.DELAY, Blow.HOLD, Blow.SLOW, Blow.LIE)
        lasting_s = f" for {self.seconds:g} s" if lasting else ""
        return f"{what}{lasting_s}, {self.moment.value} {self.state.value} ({self.label})"


def fault_commands(templates: Sequence[str], values: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Every command with every value of its placeholders; its words are split as a shell would, but none runs.

    Args:
        templates: such as `kubectl delete pod {pod}`.
        values: NAME=VALUE, several of one name.

    Raises:
        InvalidInput: a placeholder without a value, or a value that is not NAME=VALUE.
    """
    known: dict[str, list[str]] = {}
    for text in values:
        name, is_one, value = text.partition("=")
        require(bool(name and is_one and value), "fault_value", text, "NAME=VALUE")
        known.setdefault(name, []).append(value)
    return tuple(command for template in templates for command in _filled(template, known))


def _filled(template: str, known: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    words = shlex.split(template)
    require(bool(words), "fault_command", template, "a command")
    names = sorted({name for word in words for _, name, _, _ in Formatter().parse(word) if name})
    missing = [name for name in names if name not in known]
    require(
        not missing, "fault_command", template, f"given values for {', '.join(missing)} (--fault-value NAME=VALUE)"
    )
    chosen = itertools.product(*(known[name] for name in names))
    return [tuple(word.format(**dict(zip(names, each, strict=True))) for word in words) for each in chosen]


def operator_plan(operation: Operation, seed: int, faults: int) -> list[OperatorFault]:
    """So many faults: each kind at each of its states in turn; the seed decides the order and all particulars."""
    cells = _cells(operation)
    random.Random(seed).shuffle(cells)  # noqa: S311 - no secret
    places = zip(range(faults), itertools.cycle(cells), strict=False)
    return [_fault(seed * 1_000_003 + place, *cell) for place, cell in places]


_Cell = tuple[Blow | Act, str, State, tuple[str, ...]]


def _cells(operation: Operation) -> list[_Cell]:
    ways = [(CLIENT, CLIENT), *((proxy.role, proxy.label) for proxy in operation.proxies)]
    cells: list[_Cell] = [(act, CLIENT, State.TEXT, ()) for act in (Act.LEAVE, Act.SLOW_READER)]
    for role, label in ways:
        blows = [blow for blow in _BLOWS[role] if not operation.tls or blow in _OPAQUE]
        states = (State.ANY,) if operation.tls else _STATES[role]
        cells += [(blow, label, state, ()) for blow in blows for state in states]
        cells += [(Act.COMMAND, label, state, command) for command in operation.commands for state in states]
    return cells


def _fault(seed: int, kind: Blow | Act, label: str, state: State, command: tuple[str, ...]) -> OperatorFault:
    source = random.Random(seed)  # noqa: S311 - no secret
    once = state in (State.REQUEST, State.STOP)
    return OperatorFault(
        seed, kind, label, state,
        source.choice(list(Moment)),
        0 if once else source.randrange(8),
        source.choice(SECONDS),
        source.randrange(1 << 16),
        command,
    )  # fmt: skip
