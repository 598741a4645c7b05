"""Searches every state of a bounded configuration of the model: what holds in each, and that each ends."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tests.interleaving.link_model import LinkModel, State
from tests.interleaving.modelled_target import Refused


class Violated(AssertionError):
    """Something that must hold does not; says by which steps it comes to that."""

    def __init__(self, what: str, trace: list[str]) -> None:
        super().__init__(f"{what}, by: {', '.join(trace)}")
        self.what = what
        self.trace = trace


@dataclass
class Searched:
    """The states that were found, breadth first, each by its number.

    Attributes:
        parents: the state from which each was found, and the step.
        steps: from how many states to how many.
    """

    numbers: dict[State, int] = field(default_factory=dict)
    parents: list[tuple[int, str]] = field(default_factory=list)
    behind: list[list[int]] = field(default_factory=list)
    final: int = 0

    @property
    def states(self) -> int:
        return len(self.numbers)

    @property
    def steps(self) -> int:
        return sum(map(len, self.behind))

    def trace(self, number: int) -> list[str]:
        """The shortest way to a state."""
        steps: list[str] = []
        while number:
            number, step = self.parents[number]
            steps.append(step)
        return steps[::-1]


def search(model: LinkModel, most: int = 1_000_000) -> Searched:
    """Look at every state.

    Raises:
        Violated: what must hold does not in some state; with the shortest trace.
    """
    found = Searched()
    found.numbers[model.first] = 0
    found.parents.append((0, ""))
    waiting = deque([model.first])
    while waiting:
        state = waiting.popleft()
        number = found.numbers[state]
        found.behind.append([])
        try:
            model.check(state)
            for step, after in model.next(state):
                if after not in found.numbers:
                    found.numbers[after] = len(found.parents)
                    found.parents.append((number, step))
                    waiting.append(after)
                found.behind[number].append(found.numbers[after])
        except AssertionError as error:
            raise Violated(
                f"{type(error).__name__ * isinstance(error, Refused)} {error}".strip(), found.trace(number)
            ) from error
        if not found.behind[number]:
            if not state.is_final:
                raise Violated(f"nothing can happen any more, and this is left: {state}", found.trace(number))
            found.final += 1
        assert found.states <= most, f"more than {most} states"
    _check_ends(found)
    return found


def _check_ends(found: Searched) -> None:
    """No state comes again: so every way ends, and only where nothing is left."""
    comes_from = [0] * found.states
    for behind in found.behind:
        for number in behind:
            comes_from[number] += 1
    free = [number for number, ways in enumerate(comes_from) if not ways]
    passed = 0
    while free:
        passed += 1
        for number in found.behind[free.pop()]:
            comes_from[number] -= 1
            if not comes_from[number]:
                free.append(number)
    if passed < found.states:
        again = next(number for number, ways in enumerate(comes_from) if ways)
        raise Violated("this may go on for ever", found.trace(again))
