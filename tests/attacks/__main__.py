"""`python -m tests.attacks [D1 D9 …]`: try every attack, or those, against services that this starts; prints a table.

Each attack is a function in a module beside this one, or some of the suite's tests. Exit status 1 says that one did
not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.attacks import by_tests, requests
from tests.attacks.registry import ATTACKS, Outcome, chosen, table, tried

MODULES = (by_tests, requests)
"""Importing them enters their attacks."""


async def _all(numbers: list[str]) -> list[Outcome]:
    outcomes = []
    for place, each in enumerate(chosen(numbers)):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{each.number}: {each.what} …", file=sys.stderr, flush=True)  # noqa: T201
            outcomes.append(await tried(each, Path(folder) / str(place)))
    return outcomes


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("numbers", nargs="*", metavar="NUMBER", help="Of the attacks to try, such as D1; none: all.")
    numbers = parser.parse_args().numbers
    names = {each.number for each in ATTACKS}
    if unknown := sorted(set(numbers) - names):
        parser.error(f"NUMBER = {unknown[0]}: must be one of {', '.join(sorted(names))}")
    outcomes = asyncio.run(_all(numbers))
    print(table(outcomes))  # noqa: T201
    return 0 if all(each.held for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
