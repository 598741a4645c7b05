"""Files that others read while they are written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(file: Path, write: Callable[[Path], object], mode: int | None = None) -> None:
    """Write a file whole or not at all; nobody else may read it before it has its mode."""
    temporary = file.with_name(f".{os.getpid()}-{file.name}")
    try:
        if mode is not None:
            temporary.touch(mode)
            temporary.chmod(mode)
        write(temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(file: Path, text: str, mode: int | None = None) -> None:
    """Write a small file so that a reader sees all of it or nothing."""
    replace_file(file, lambda temporary: temporary.write_text(text), mode)
