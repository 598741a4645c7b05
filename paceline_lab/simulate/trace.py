"""Traces: what a run's requests were, what a draft would have got right in them, and what their rounds took.

A trace is a file of JSON lines. The first is the header, each other one a request:

    {"format": "paceline-trace", "version": 2, "alone": [[rows, ms], …], "beside": […], "draft": […],
     "draft_beside": […], "target_one_way_ms": …, "draft_one_way_ms": …, "coordinator_ms": …, "proposal_ms": …,
     "gap_ms": …, "draft_gap_ms": …,
     "num_draft_tokens": k or null, "fan_out": …, "lease": …, "max_prefetched": …, "concurrency": …, "notes": {…}}
    {"arrival_ms": …, "prompt": […], "answer": […], "ranks": […], "chances": […],
     "rounds": [{"at_ms": …, "committed": …, "proposed": …, "accepted": …, "round_ms": …, "draft_wait_ms": …,
                 "drafter": "…", "hit": …, "self_started": …}, …]}

`prompt` and `answer`: token ids, numbered anew in the order in which a trace has them first: they say which tokens
are the same, and not which. `ranks` and `chances` have one entry for each token of the answer. `ranks`: the token's
place in the draft's own order under the shared noise; 1: the draft's own choice; 0: not ranked, or not known.
`chances`: the draft's probability of its own first choice. Times count from the first arrival. `rounds` may be empty:
a synthetic trace has not been measured. Coupled acceptance alone: there ranks decide what any proposal would have
brought.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.costs.cost_line import CostLine
from paceline.protocol.errors import InvalidInput, require
from paceline.protocol.given_files import read_json_lines
from paceline.sampling.suffix import SuffixAutomaton

FORMAT = "paceline-trace"
VERSION = 2
MAX_RANK = 1 << 20
MAX_ID = 1 << 28
MOST_RIGHT = 64
"""Most tokens of a match's continuation that are compared: a proposal's longest path."""
_LINES = ("alone", "beside", "draft", "draft_beside")
_LISTS = ("prompt", "answer", "ranks", "chances")


@dataclass(frozen=True)
class TracedRound:
    """A round that was measured; `at_ms`: when it was decided."""

    at_ms: float
    committed: int
    proposed: int = 0
    accepted: int = 0
    round_ms: float = 0.0
    draft_wait_ms: float = 0.0
    drafter: str = ""
    hit: bool = False
    self_started: bool = False


@dataclass(frozen=True)
class TracedRequest:
    """One request; the module's text says what the lists hold.

    Attributes:
        tenant, group: whose it is, and whose figures it counts to.

    Raises:
        InvalidInput: naming the field.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ranks: tuple[int, ...]
    chances: tuple[float, ...]
    arrival_ms: float = 0.0
    rounds: tuple[TracedRound, ...] = ()
    tenant: str = ""
    group: int = 0

    def __post_init__(self) -> None:
        tokens = len(self.answer)
        require(tokens >= 1, "answer", tokens, "at least one token")
        require(bool(self.prompt), "prompt", len(self.prompt), "at least one token")
        for name in ("ranks", "chances"):
            length = len(getattr(self, name))
            require(length == tokens, name, length, f"{tokens} entries, one for each token")
        for name in ("prompt", "answer"):
            ids = getattr(self, name)
            require(min(ids) >= 0 and max(ids) < MAX_ID, name, [min(ids), max(ids)], f"ids in [0, {MAX_ID})")
        require(min(self.ranks) >= 0 and max(self.ranks) <= MAX_RANK, "ranks", max(self.ranks), f"in [0, {MAX_RANK}]")
        require(min(self.chances) >= 0 and max(self.chances) <= 1, "chances", max(self.chances), "in [0, 1]")
        require(self.arrival_ms >= 0, "arrival_ms", self.arrival_ms, "at least 0")

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return len(self.answer)


@dataclass(frozen=True)
class TracedSetting:
    """The services of a run and what requests got of the coordinator. Lines as the services stated them.

    Attributes:
        alone, beside: a target step by its rows, alone and while a draft works on its cores; empty: none does.
        draft, draft_beside: a draft step by its rows, and one beside the target's; empty: no draft, or not known.
        coordinator_ms: the coordinator's own time for a round, one after the other for all sessions.
        proposal_ms: the coordinator's time for a proposal that comes, and the draft service's for one that leaves.
        gap_ms: from a step of the target to the next beyond its line, where that needs nothing of a coordinator.
        draft_gap_ms: what a step of the draft takes beyond its line: the choice of rows, draws, answers.
        concurrency: requests that run at once, the next beginning when one has ended; 0: each comes at its arrival.
        num_draft_tokens: None: the planner chose.
        max_sessions, prefill_chunk: of the target.
    """

    alone: CostLine
    beside: CostLine = field(default_factory=CostLine)
    draft: CostLine = field(default_factory=CostLine)
    draft_beside: CostLine = field(default_factory=CostLine)
    target_one_way_ms: float = 0.0
    draft_one_way_ms: float = 0.0
    coordinator_ms: float = 0.0
    proposal_ms: float = 0.0
    gap_ms: float = 0.0
    draft_gap_ms: float = 0.0
    num_draft_tokens: int | None = None
    fan_out: int = 0
    lease: int = 16
    max_prefetched: int = 24
    max_sessions: int = 256
    prefill_chunk: int = 128
    concurrency: int = 0
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.alone.is_known, "alone", self.alone.points, "a line of one point or more")
        times = ("target_one_way_ms", "draft_one_way_ms", "coordinator_ms", "proposal_ms", "gap_ms", "draft_gap_ms")
        for name in (*times, "lease", "max_prefetched", "fan_out", "concurrency"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("max_sessions", "prefill_chunk"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    def of_run(self, **changes: Any) -> TracedSetting:
        """The same services with other settings of a run."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Trace:
    """A setting and its requests."""

    setting: TracedSetting
    requests: tuple[TracedRequest, ...]

    def __post_init__(self) -> None:
        require(bool(self.requests), "requests", len(self.requests), "one or more")


def match_shadow(prompt: Sequence[int], answer: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the length of the n-gram match before each token of an answer, and how much of what follows is right."""
    text = SuffixAutomaton(prompt)
    lengths, right = [], []
    for place, token in enumerate(answer):
        match = text.match(text.own_suffix())
        continuation = match.continuation(min(MOST_RIGHT, len(answer) - place)) if match else ()
        right_tokens = 0
        while right_tokens < len(continuation) and continuation[right_tokens] == answer[place + right_tokens]:
            right_tokens += 1
        lengths.append(match.length if match else 0)
        right.append(right_tokens)
        text.extend((token,))
    return tuple(lengths), tuple(right)


def number_anew(requests: Sequence[TracedRequest]) -> tuple[TracedRequest, ...]:
    """Return the requests with their token ids numbered in the order in which they come."""
    numbers: dict[int, int] = {}

    def renumber(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(token, len(numbers)) for token in ids)

    return tuple(replace(each, prompt=renumber(each.prompt), answer=renumber(each.answer)) for each in requests)


def write_trace(path: Path, trace: Trace) -> None:
    """Write a file that `read_trace` reads."""
    header = {"format": FORMAT, "version": VERSION} | asdict(trace.setting)
    for name in _LINES:
        header[name] = getattr(trace.setting, name).points
    lines = [header, *(asdict(request) for request in trace.requests)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        InvalidInput: there is none, or a line of it is wrong; it names the line.
    """
    values = [_object(where, value) for where, value in read_json_lines("trace", path)]
    require(len(values) >= 2, "trace", str(path), "a header and one request or more")
    setting = _read(1, _setting_of, values[0])
    return Trace(setting, tuple(_read(number, _request_of, value) for number, value in enumerate(values[1:], 2)))


def _object(where: str, value: Any) -> dict[str, Any]:
    require(isinstance(value, dict), where, value, "a JSON object")
    return dict(value)


def _read(number: int, make: Any, value: dict[str, Any]) -> Any:
    """What a line holds, or an error that names the line."""
    try:
        return make(value)
    except (InvalidInput, TypeError, ValueError, KeyError) as error:
        reason = error.message if isinstance(error, InvalidInput) else repr(error)
        raise InvalidInput(f"line {number} of the trace: {reason}") from error


def _setting_of(value: dict[str, Any]) -> TracedSetting:
    kind, version = value.pop("format", None), value.pop("version", None)
    require(kind == FORMAT, "format", kind, FORMAT)
    require(version == VERSION, "version", version, f"{VERSION}, the only one that this release reads")
    for name in _LINES:
        value[name] = CostLine(tuple((rows, ms) for rows, ms in value.pop(name, ())))
    return TracedSetting(**value)


def _request_of(value: dict[str, Any]) -> TracedRequest:
    for name in _LISTS:
        value[name] = tuple(value[name])
    value["rounds"] = tuple(TracedRound(**each) for each in value.pop("rounds", ()))
    return TracedRequest(**value)
