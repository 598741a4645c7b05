"""A GGUF file in wheels, as the package index has them."""

from __future__ import annotations

import zipfile
from pathlib import Path

from paceline.models.pull import file_digest
from paceline.models.pullable import Wheel


def write_wheels(gguf_file: Path, folder: Path, parts: int, files: int = 1) -> tuple[Wheel, ...]:
    """Put a GGUF file into so many wheels, of which each holds `files` parts."""
    data = gguf_file.read_bytes()
    size = -(-len(data) // parts)
    wheels = []
    for number in range(1, parts + 1):
        package = f"tiny-part{number}"
        file = folder / f"{package}.whl"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for index in range(files):
                member = zipfile.ZipInfo(f"{package}/data/part{number}-{index}.bin")  # of one date: one digest
                archive.writestr(member, data[(number - 1) * size : number * size])
        wheels.append(Wheel(package, "0.1", file.stat().st_size, file_digest(file)))
    return tuple(wheels)
