"""The codec again, guided by what is reached: what takes a new way through it is mutated further.

Ways are pairs of lines that follow each other in `paceline.protocol` and in the functions that the codec writes out.
A case depends on those before it, so case n is tried again by trying all up to n: some tenths of a millisecond each.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import paceline.protocol
from paceline.protocol import codec
from tests.fuzz.byte_mutations import mutated_bytes
from tests.fuzz.cases import SLOW_S, FuzzCase, within
from tests.fuzz.codec_surface import NAMES, CodecTarget, decoded, mutated_wire
from tests.fuzz.corpus import parts_of_messages, stored_messages
from tests.fuzz.message_mutations import mutated_message

WATCHED = (str(Path(paceline.protocol.__file__).parent), "<copier of ")
FRESH = 0.1
"""Share of cases that begin with a stored message again; the others go on from what reached something new."""
Way = tuple[CodeType, int, int]


class Ways:
    """The pairs of lines that were taken, all of them and those of the present case."""

    def __init__(self) -> None:
        self.known: set[Way] = set()
        self.new: set[Way] = set()
        self._watched: dict[CodeType, bool] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is taken meanwhile."""
        self.new = set()
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)
            self.known |= self.new

    @property
    def lines(self) -> set[tuple[str, int]]:
        """The lines reached, by file."""
        return {(code.co_filename, line) for code, _, line in self.known}

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        watched = self._watched.get(code)
        if watched is None:
            watched = self._watched[code] = code.co_filename.startswith(WATCHED)
        if not watched:
            return None
        known, new, last = self.known, self.new, 0

        def stepped(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            way = (code, last, frame.f_lineno)
            if way not in known:
                new.add(way)
            last = frame.f_lineno
            return stepped

        return stepped


@dataclass
class GuidedTarget(CodecTarget):
    """The codec in this process, and what has reached something new in it."""

    rng: random.Random
    ways: Ways = field(default_factory=Ways)
    found: list[tuple[str, bytes]] = field(default_factory=list)
    tried: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    async def run(self, case: FuzzCase) -> str:
        while self.tried < case.index:
            self._next(())
        return self._next((case.index,))

    async def probe(self) -> None:
        with self.ways.watching():
            await super().probe()

    def facts(self) -> dict[str, str]:
        lines = executable_lines()
        reached = len(lines & self.ways.lines)
        return {
            "lines of the codec reached": f"{reached} of {len(lines)} ({reached / len(lines):.0%})",
            "ways between lines": str(len(self.ways.known)),
            "inputs that reached something new": str(len(self.found)),
        }

    def _next(self, reported: tuple[int, ...]) -> str:
        name, wire = self._input()
        self.tried += 1
        began = time.thread_time()
        try:
            with self.ways.watching():
                kind = decoded(name, wire)
        except Exception:
            if reported:
                raise
            return ""
        if time.thread_time() - began > SLOW_S:
            began = time.thread_time()
            decoded(name, wire)  # watching takes ten times as long
            within(SLOW_S, began)
        if self.ways.new:
            self.found.append((name, wire))
        return kind

    def _input(self) -> tuple[str, bytes]:
        rng = self.rng
        if not self.found or rng.random() < FRESH:
            name = rng.choice(NAMES)
            return name, mutated_wire(rng, name)
        # What was found last is least explored.
        name, wire = self.found[-1 - int(len(self.found) * rng.random() ** 2)]
        if rng.random() < 0.5:
            kind = type(stored_messages(name)[0])
            try:
                message = kind.FromString(wire)
            except Exception:  # noqa: BLE001  bytes that are no message are mutated as bytes
                return name, mutated_bytes(rng, wire, wire)
            return name, mutated_message(rng, message, parts_of_messages()).SerializeToString()
        return name, mutated_bytes(rng, wire, rng.choice(self.found)[1], most=2)


def executable_lines() -> set[tuple[str, int]]:
    """Lines inside the functions of the codec's modules, but for those that write functions out at import."""
    found: set[tuple[str, int]] = set()
    for file in Path(codec.__file__).parent.glob("*.py"):
        if file.name != "copying.py":
            found |= {(str(file), line) for line in _of(compile(file.read_text(), str(file), "exec"), inside=False)}
    return found


def _of(code: CodeType, *, inside: bool) -> set[int]:
    lines = {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno} if inside else set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            is_class = constant.co_flags & 0x1 == 0
            lines |= _of(constant, inside=not is_class)
    return lines


@asynccontextmanager
async def open_guided(seed: int) -> AsyncIterator[GuidedTarget]:
    """Guided by what is reached."""
    yield GuidedTarget(random.Random(f"guided {seed}"))
