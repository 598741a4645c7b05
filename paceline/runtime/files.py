"""Files that others read while they are written, and files that are read again while a process runs.

Somebody may put anything in the place of keys, certificates and endpoints at any time. Only regular files are read,
and opening never waits: a FIFO that nobody writes to would block the thread for good, and the process's end with it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from paceline.protocol.errors import InvalidInput, require


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


MAX_LIVE_BYTES = 4 << 20
"""Most bytes of such a file; a bundle of all public authorities has some 220 KiB."""
_KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"))


def read_live(field: str, file: Path, kind: str, most_bytes: int = MAX_LIVE_BYTES) -> bytes:
    """The present content of a file.

    Args:
        field: what the configuration calls it, for the error.
        file: where it is.
        kind: what it should hold, such as `JSON`, for the error.
        most_bytes: the most that is read.

    Raises:
        InvalidInput: it is missing, unreadable, too large or no regular file.
    """
    try:
        with open(file, "rb", opener=_open) as stream:
            content = stream.read(most_bytes + 1)
    except _Irregular as error:
        raise InvalidInput.of(field, str(file), f"a readable {kind} file (it is {error})") from error
    except OSError as error:
        raise InvalidInput.of(field, str(file), f"a readable {kind} file ({error.strerror})") from error
    require(len(content) <= most_bytes, field, str(file), f"a file of at most {most_bytes} bytes")
    return content


class _Irregular(Exception):
    """A file is no regular one; the message says what it is."""


def _open(path: str, flags: int) -> int:
    """Open a file without waiting for anybody."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise _Irregular(next((name for holds, name in _KINDS if holds(mode)), "a device"))
