"""`python -m tools.constraints`: pin what `make setup` and the images install to the versions of this environment.

The tests have run with these versions, so a release of another project can't break a clone of this one. The file has
every distribution that Paceline's extras need here; torch pins its own CUDA packages, which images need as well. To
follow new releases: `pip install --upgrade --upgrade-strategy eager -e .[…]`, `make test`, then this.
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


def pinned_versions(root: str = "paceline", extras: tuple[str, ...] | None = None) -> dict[str, str]:
    """Versions by name of all that `root` with `extras` needs here (None: all extras), without `root` itself."""
    versions, earlier = dict[str, str](), file_versions()
    if extras is None:
        extras = tuple(distribution(root).metadata.get_all("Provides-Extra") or ())
    waiting = [(root, extras)]
    while waiting:
        name, required_extras = waiting.pop()
        for requirement in _requirements(name, required_extras):
            key = canonicalize_name(requirement.name)
            if key in versions or key == root:
                continue
            try:
                # A local version names a build, which is the index's to choose.
                versions[key] = distribution(key).version.partition("+")[0]
            except PackageNotFoundError:  # an extra that tests do without keeps its pin
                versions |= {key: earlier[key]} if key in earlier else {}
                continue
            waiting.append((key, tuple(requirement.extras)))
    return dict(sorted(versions.items()))


def file_versions() -> dict[str, str]:
    """Versions by name that the file pins."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def main() -> None:
    """Write the file."""
    lines = [f"{name}=={version}\n" for name, version in pinned_versions().items()]
    FILE.write_text(HEADER + "".join(lines))
    sys.stdout.write(f"{FILE}: {len(lines)} pinned\n")


def _requirements(name: str, extras: tuple[str, ...]) -> Iterator[Requirement]:
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in (*extras, "")):
            yield requirement


if __name__ == "__main__":
    main()
