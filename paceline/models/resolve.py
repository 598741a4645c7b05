"""From a model's name to where it is: names, folders, GGUF files, hub ids, drafts."""

from __future__ import annotations

import itertools
import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from paceline.models.pullable import PULLABLE
from paceline.models.table_names import TableSpec, is_table
from paceline.protocol.errors import InvalidInput

PROVENANCE_FILE = "provenance.json"
MANIFEST_FILE = "manifest.json"
"""The file that makes a folder a draft; `paceline_training.checkpoint` describes it."""
DRAFTS_PACKAGE = "paceline_drafts"
"""The package of the distribution `paceline-drafts`: one folder a draft, named by its target and its kind."""
INSTALL_DRAFTS = "pip install paceline-drafts, or in a checkout: pip install ./drafts"
DEFAULT_DRAFT = "default"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LAYERS = "#layers="


@dataclass(frozen=True)
class ModelSource:
    """The place and kind of a model, by its name.

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
    def gguf(self) -> Path | None:
        """The file of a `.gguf` path."""
        return None if self.gguf_file is None else Path(self.location) / self.gguf_file


def model_home() -> Path:
    """Folder of everything that Paceline caches: PACELINE_HOME, else in the user's cache folder."""
    if home := os.environ.get("PACELINE_HOME"):
        return Path(home).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "paceline"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "paceline"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def pulled_path(name: str) -> Path:
    """Folder that a pulled model has, or would have."""
    return model_home() / "models" / name


def is_pulled(name: str) -> bool:
    """Whether a pull of `name` has finished; folders appear whole or not at all."""
    return (pulled_path(name) / PROVENANCE_FILE).is_file()


def kept_gguf(name: str) -> Path:
    """The GGUF file that a pulled model has, if it was pulled with it."""
    return pulled_path(name) / f"{name}.gguf"


def resolve(model: str) -> ModelSource:
    """Find what a model's name stands for: table, pulled model, folder, `.gguf` path or hub id.

    `MODEL#layers=0,1,2,29` keeps those layers alone. `NAME.gguf` is the GGUF file that a pulled model was kept with.

    Raises:
        InvalidInput: nothing has that name, or a known model is not pulled.
    """
    base, marker, numbers = model.partition(_LAYERS)
    layers = _parse_layers(model, numbers) if marker else None
    suffix = marker + numbers
    if is_table(base):
        if marker:
            raise InvalidInput.of("model", model, "without layers: a table model has none")
        return ModelSource(TableSpec.parse(base).distribution, "table", base)
    if base in PULLABLE:
        if not is_pulled(base):
            raise InvalidInput.of("model", base, f"pulled first (run: paceline pull {base})")
        return ModelSource(base + suffix, "folder", str(pulled_path(base)), layers=layers)
    path = Path(base).expanduser()
    if not path.exists() and path.suffix == ".gguf" and base.removesuffix(path.suffix) in PULLABLE:
        path = kept_gguf(path.stem)
        if not path.is_file():
            raise InvalidInput.of("model", base, f"pulled first (run: paceline pull {path.stem} --keep-gguf)")
    if base and path.is_dir():
        return ModelSource(path.resolve().name + suffix, "folder", str(path), layers=layers)
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(path.stem + suffix, "gguf", str(path.parent), path.name, layers)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(base):
        names = ", ".join(PULLABLE)
        raise InvalidInput.of("model", model, f"a folder, a .gguf file, a hub id, table:… or one of: {names}")
    return ModelSource(base + suffix, "hub", base, layers=layers)


def is_draft(folder: str | Path) -> bool:
    """Whether a model's name is a folder with a draft's manifest."""
    return (Path(folder).expanduser() / MANIFEST_FILE).is_file()


def shipped_draft(target: str, kind: str = "") -> Path | None:
    """Folder of the installed `paceline-drafts` with a draft for a target of that name; None: there is none.

    Without a kind it is the target's default; others are called by theirs, such as `eagle3`.
    """
    return _shipped_folders().get(f"{target}-{kind}" if kind else target)


def shipped_kinds(target: str) -> tuple[str, ...]:
    """Kinds of the shipped drafts for a target beside its default."""
    prefix = f"{target}-"
    return tuple(name.removeprefix(prefix) for name in _shipped_folders() if name.startswith(prefix))


def pullable_draft(target: str) -> str | None:
    """Name of the pullable model that drafts for a target of that name; None: none does, or a draft is shipped."""
    model = PULLABLE.get(target)
    return None if model is None or shipped_draft(target) is not None else model.draft


def missing_draft(target: str) -> str | None:
    """The missing part of a target's default draft, and the command that gets it; None: nothing is missing."""
    if _lacks_package(target):
        return f"paceline-drafts is not installed (run: {INSTALL_DRAFTS})"
    draft = pullable_draft(target)
    return None if draft is None or is_pulled(draft) else f"{draft} is not pulled (run: paceline pull {draft})"


def resolve_draft(model: str, target: str | None) -> str:
    """The model of a drafter's `model:NAME` for a target: NAME itself, or for `default` the target's own draft.

    That is the shipped draft's folder, or the name of the pullable model that drafts for the target. `default-KIND`
    is another one that is shipped for it.

    Raises:
        InvalidInput: `default` for a target that has no draft of its own, or none of the kind, or for no target; or
            `paceline-drafts`, which has it, is not installed.
    """
    if model != DEFAULT_DRAFT and not model.startswith(f"{DEFAULT_DRAFT}-"):
        return model
    if _lacks_package(target or ""):
        raise InvalidInput.of("drafter", f"model:{model}", f"installed first (run: {INSTALL_DRAFTS})")
    if model != DEFAULT_DRAFT:
        return _shipped_of_kind(model, target or "")
    own = None if target is None else shipped_draft(target) or pullable_draft(target)
    if own is None:
        limit = f"the path of a draft: none comes with target {target} (make one: paceline train draft)"
        raise InvalidInput.of("drafter", f"model:{DEFAULT_DRAFT}", limit)
    return str(own)


def _shipped_folders() -> dict[str, Path]:
    """Drafts of the package by the names of their folders, in alphabetical order; none where it isn't installed."""
    spec = find_spec(DRAFTS_PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    folders = sorted(folder for place in places or () for folder in Path(place).glob("*"))
    return {folder.name: folder for folder in folders if is_draft(folder)}


def _lacks_package(target: str) -> bool:
    """Whether a target's default draft is in a package that isn't installed."""
    model = PULLABLE.get(target)
    return model is not None and model.draft_is_packaged and find_spec(DRAFTS_PACKAGE) is None


def _shipped_of_kind(model: str, target: str) -> str:
    folder = shipped_draft(target, model.removeprefix(f"{DEFAULT_DRAFT}-"))
    if folder is None:
        names = ", ".join(f"{DEFAULT_DRAFT}-{kind}" for kind in shipped_kinds(target)) or "none"
        raise InvalidInput.of("drafter", f"model:{model}", f"one that comes with target {target or 'none'}: {names}")
    return str(folder)


def _parse_layers(model: str, numbers: str) -> tuple[int, ...]:
    try:
        layers = tuple(int(layer) for layer in numbers.split(","))
    except ValueError:
        layers = ()
    ascending = all(a < b for a, b in itertools.pairwise(layers))
    if not layers or layers[0] < 0 or not ascending:
        raise InvalidInput.of("model", model, "MODEL#layers=I,J,… with ascending layer numbers")
    return layers
