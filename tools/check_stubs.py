"""Check that the committed stubs are what protoc makes of protos/: exit 1 and name the stale files if not."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("paceline/v1")
STUBS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(root: Path, destination: Path) -> None:
    """Write the stubs of root/protos below `destination`. Raises RuntimeError if protoc fails."""
    sources = sorted(str(path.relative_to(root / "protos")) for path in (root / "protos" / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}={destination}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    if protoc.main(["protoc", f"-I{root / 'protos'}", *outputs, *sources]) != 0:
        raise RuntimeError("protoc failed")


def stale_files(root: Path) -> list[str]:
    """Committed stubs that differ from generated ones, are missing, or have no proto any more."""
    with tempfile.TemporaryDirectory() as folder:
        generate(root, Path(folder))
        fresh, committed = _contents(Path(folder) / PACKAGE), _contents(root / PACKAGE)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> int:
    """Run the check on this checkout."""
    stale = stale_files(ROOT)
    for name in stale:
        sys.stderr.write(f"stale stub: {PACKAGE / name} (run `make stubs`)\n")
    return 1 if stale else 0


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for pattern in STUBS for path in folder.glob(pattern)}


if __name__ == "__main__":
    sys.exit(main())
