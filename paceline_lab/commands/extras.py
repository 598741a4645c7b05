"""What the laboratory's commands share: options with several numbers, and the packages that they need."""

from __future__ import annotations

from importlib import util

from paceline.cli.support import has_engine, split_commas
from paceline.protocol.errors import InvalidInput, PacelineError, require


def numbers(field: str, text: str) -> tuple[float, ...]:
    """Read an option's numbers.

    Raises:
        InvalidInput: one of them is none.
    """
    try:
        return tuple(float(each) for each in split_commas(text))
    except ValueError as error:
        raise InvalidInput.of(field, text, "numbers with commas between") from error


def whole_numbers(field: str, text: str, least: int = 0) -> tuple[int, ...]:
    """Read an option's whole numbers.

    Raises:
        InvalidInput: it names the first that is none, or below `least`.
    """
    for each in split_commas(text):
        limit = f"whole numbers, at least {least}, with commas between"
        require(each.isdecimal() and int(each) >= least, field, each, limit)
    return tuple(int(each) for each in split_commas(text))


def need_benchmarks(command: str) -> None:
    """Refuse a command that draws plots or measures, where this installation can't.

    Raises:
        PacelineError: it names the package to install.
    """
    if not has_engine() or util.find_spec("matplotlib") is None:
        raise PacelineError(f"`paceline {command}` needs the benchmarks: pip install 'paceline[bench]'")
