"""The kinds of drafters that read the target's features: how each is told from a folder's files, and loaded.

A kind is added here and nowhere else. The first that recognises a folder loads it; a folder that none recognises is a
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.drafters.formats import dflash, eagle, medusa, mtp, speculators_eagle3
from paceline.drafters.formats.draft_files import read_config_if_any, tensor_names
from paceline.drafters.formats.target_weights import TargetWeights
from paceline.drafters.heads.eagle_rows import EagleDraft, build_eagle_rows
from paceline.drafters.heads.own_features import OwnFeaturesEngine
from paceline.engine.features import FeatureEngine
from paceline.models.quantized import refuse_quantized
from paceline.protocol.errors import InvalidInput, PacelineError
from paceline.runtime.config import EngineSettings

Load = Callable[[Path, TargetWeights, EngineSettings], FeatureEngine]
_MOST_SAID = 160
"""Characters of a library's message."""


@dataclass(frozen=True)
class DraftFolder:
    """The parts of a folder that tell its kind."""

    path: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Its `config.json`; empty, if it has none."""
        return read_config_if_any(self.path)

    @cached_property
    def names(self) -> frozenset[str]:
        """Its tensors."""
        return frozenset(tensor_names(self.path))


@dataclass(frozen=True)
class DraftKind:
    """A kind of drafter: its name, whether a folder is one, and its engine on a target."""

    name: str
    is_it: Callable[[DraftFolder], bool]
    load: Load


def _by_rows(load: Callable[[Path, TargetWeights, EngineSettings], EagleDraft]) -> Load:
    """The loader of an engine, from the loader of its draft."""

    def load_engine(folder: Path, target: TargetWeights, settings: EngineSettings) -> FeatureEngine:
        rows = build_eagle_rows(load(folder, target, settings), target.tokenizer, settings, folder.resolve().name)
        return OwnFeaturesEngine(rows)

    return load_engine


KINDS = (
    DraftKind(medusa.KIND, lambda folder: medusa.is_medusa(folder.names), medusa.load_medusa),
    DraftKind(mtp.KIND, lambda folder: mtp.is_speculators_mtp(folder.config), mtp.load_mtp_engine),
    # Before EAGLE-1, whose tensors have the same names.
    DraftKind(dflash.KIND, lambda folder: dflash.is_dflash(folder.config), dflash.load_dflash_engine),
    DraftKind(eagle.KIND, lambda folder: eagle.is_eagle(folder.names), _by_rows(eagle.load_eagle)),
    # Last of those that speculators writes: it refuses the others by name.
    DraftKind(
        speculators_eagle3.KIND,
        lambda folder: speculators_eagle3.is_speculators(folder.config),
        _by_rows(speculators_eagle3.load_speculators_eagle3),
    ),
)


def kind_of(path: Path) -> DraftKind | None:
    """The kind of drafter in a folder; None: it holds none of these kinds.

    Raises:
        InvalidInput: its configuration can't be read.
        DamagedFile: naming the file.
    """
    folder = DraftFolder(path)
    with _refusing(path, "a drafter's"):
        return next((kind for kind in KINDS if kind.is_it(folder)), None)


def load_kind(kind: DraftKind, path: Path, target: str | None, settings: EngineSettings) -> FeatureEngine:
    """The engine of a folder of that kind.

    Raises:
        InvalidInput: no target is given, or the draft is another target's.
        Unsupported: the draft can't be served exactly, or is unknown.
    """
    if target is None:
        raise InvalidInput.of("target_model", target, f"given: {path.name} is a {kind.name} draft, which needs it")
    return load_onto(kind, path, TargetWeights.load(target, settings), settings)


def load_onto(kind: DraftKind, path: Path, target: TargetWeights, settings: EngineSettings) -> FeatureEngine:
    """The engine of a folder on a target's weights. Raises as `load_kind`."""
    with _refusing(path, f"a {kind.name} draft's"):
        refuse_quantized(path.name, read_config_if_any(path))
        return kind.load(path, target, settings)


def load_own(target: TargetWeights, settings: EngineSettings) -> FeatureEngine:
    """The multi-token prediction of a target's own checkpoint. Raises as `load_kind`."""
    with _refusing(Path(target.source.location), "a target's"):
        return mtp.load_own_mtp(target, settings)


@contextmanager
def _refusing(path: Path, owner: str) -> Iterator[None]:
    """Refuse a folder for any error that its configuration and tensors cause in the libraries.

    The files are somebody else's, and libraries check little of them: a size that is a text fails in as many ways as
    it is used. `owner`: whose folder it must be, for the message.
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        message = str(error).strip().replace("\n", " ")[:_MOST_SAID]
        limit = f"{owner} folder, whole and consistent ({type(error).__name__}: {message})"
        raise InvalidInput.of("model", str(path), limit) from error
