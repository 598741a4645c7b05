"""`python -m tests.fuzz [SURFACE …]`: fuzz surfaces, all or these, and keep what became of the cases as JSON.

`--index N` tries one case again. `python -m tests.fuzz.report` writes the report.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.fuzz.cases import SurfaceTally, fuzz, keep_tally
from tests.fuzz.surfaces import CASES, SURFACES

BUILD = Path("build/fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("surfaces", nargs="*", metavar="SURFACE", help=f"Of {', '.join(SURFACES)}; none: all.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="Index of the first case: 100,000 are tried in pieces.")
    parser.add_argument("--cases", type=int, help="Of each surface; not given: its share of 100,000.")
    parser.add_argument("--index", type=int, help="Try this case alone, and keep nothing.")
    parser.add_argument("--out", type=Path, default=BUILD, help="Where results are kept.")
    arguments = parser.parse_args()
    if unknown := set(arguments.surfaces) - set(SURFACES):
        parser.error(f"SURFACE = {min(unknown)}: must be one of {', '.join(SURFACES)}")
    results = [_found(arguments, name) for name in arguments.surfaces or SURFACES]
    return int(any(results))


def _found(arguments: argparse.Namespace, name: str) -> bool:
    last = CASES[name] if arguments.cases is None else arguments.first + arguments.cases
    indices = range(arguments.first, last) if arguments.index is None else range(arguments.index, arguments.index + 1)
    tally = asyncio.run(fuzz(SURFACES[name], arguments.seed, indices))
    _say(tally)
    if arguments.index is None:
        keep_tally(arguments.out, tally)
    return bool(tally.findings)


def _say(tally: SurfaceTally) -> None:
    kinds = ", ".join(f"{kind} {count}" for kind, count in tally.kinds.most_common())
    sys.stdout.write(f"{tally.surface}: {tally.cases} cases in {tally.seconds:.1f} s: {kinds} {tally.facts or ''}\n")
    for finding in tally.findings:
        sys.stdout.write(f"  FOUND {finding.what}\n        {finding.case.replay}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
