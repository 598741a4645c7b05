"""`python -m tests.attacks [D1 D9 …]`: try every attack, or those, against services that this starts; prints a table.

Each attack is a function in a module beside this one. Exit status 1 says that one did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.attacks import by_tests, drafts, grammars, processes, requests, targets
from tests.attacks.registry import ATTACKS, Outcome, chosen, table, tried

MODULES = (by_tests, drafts, grammars, processes, requests, targets)
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
    parser.add_argument("numbers", nargs="*", choices=sorted({each.number for each in ATTACKS}), metavar="NUMBER")
    outcomes = asyncio.run(_all(parser.parse_args().numbers))
    print(table(outcomes))  # noqa: T201
    return 0 if all(each.held for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
