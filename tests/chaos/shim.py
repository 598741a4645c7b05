"""The preloaded library (`shim.c`) by which services' wall clocks jump and their names stop resolving."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")


class Shim:
    """Built in a folder, which services then find in their environment; needs a C compiler."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        assert compiler is not None, "clocks that jump and names that don't resolve need a C compiler (cc)"
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.absolute()
        library = self._folder / "shim.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_FOLDER": str(self._folder)}

    def jump(self, pid: int, seconds: int) -> None:
        with (self._folder / f"clock.{pid}").open("r+b") as file:
            file.write(struct.pack("=q", seconds))

    def resolve(self, name: str, addresses: Sequence[str]) -> None:
        """Have a name (`….chaos`) resolve so, from now on; without addresses: not."""
        hosts = self._folder / f"{name}.hosts"
        new = hosts.with_suffix(".new")
        new.write_text(" ".join(addresses))
        new.replace(hosts)
