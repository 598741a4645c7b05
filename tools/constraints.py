"""`python -m tools.constraints`: pin what `make setup` and the images install to the versions of this environment.

They are what the tests have run with: a release of another project can't break a clone of this one. The file names
every distribution that Paceline's extras need here; what an image needs beyond (torch's own CUDA packages) torch pins
itself. To follow new releases: `pip install --upgrade --upgrade-strategy eager -e .[…]`, `make test`, then this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILE = Path(__file__).parents[1] / "constraints.txt"
HEADER = "# Written by `python -m tools.constraints`: the versions that the tests have run with.\n"


def pinned(root: str = "paceline", extras: tuple[str, ...] | None = None) -> dict[str, str]:
    """Name and version of each distribution that `root` with `extras` needs here (None: all), itself left out."""
    found: dict[str, str] = {}
    if extras is None:
        extras = tuple(distribution(root).metadata.get_all("Provides-Extra") or ())
    waiting = [(root, extras)]
    while waiting:
        name, wanted = waiting.pop()
        for requirement in _requirements(name, wanted):
            key = canonicalize_name(requirement.name)
            if key in found or key == root:
                continue
            try:
                # A local version names a build, which is the index's to choose.
                found[key] = distribution(key).version.partition("+")[0]
            except PackageNotFoundError:
                continue
            waiting.append((key, tuple(requirement.extras)))
    return dict(sorted(found.items()))


def main() -> None:
    """Write the file."""
    lines = [f"{name}=={version}\n" for name, version in pinned().items()]
    FILE.write_text(HEADER + "".join(lines))
    sys.stdout.write(f"{FILE}: {len(lines)} pinned\n")


def _requirements(name: str, extras: tuple[str, ...]) -> Iterator[Requirement]:
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in (*extras, "")):
            yield requirement


if __name__ == "__main__":
    main()
