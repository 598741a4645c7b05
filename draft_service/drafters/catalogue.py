"""The drafters of a service, by the names that sessions use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from draft_service.drafters.interface import AnyDrafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.names import MODEL, check_drafters
from paceline.costs.cost_line import CostLine
from paceline.engine.interface import Engine
from paceline.engine.loading import load_engine
from paceline.grammars.sessions import Grammars
from paceline.models.resolve import is_draft, resolve_draft
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import InvalidInput, VocabularyMismatch
from paceline.protocol.handshake import Fingerprint
from paceline.runtime.config import DraftConfig


@dataclass(frozen=True)
class Catalogue:
    """Drafters by name, the default first, the engines that they run on, and who follows grammars (None: nobody)."""

    drafters: Mapping[str, AnyDrafter]
    engines: tuple[Engine, ...]
    grammars: Grammars | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names on offer, the default first."""
        return tuple(self.drafters)

    @property
    def fingerprint(self) -> Fingerprint:
        """The first engine's."""
        return self.engines[0].info.fingerprint

    @property
    def max_length(self) -> int:
        """Longest prefix that every drafter takes, in tokens."""
        return min(engine.info.max_length for engine in self.engines)

    @property
    def kv_rows(self) -> int:
        """KV rows held by all engines."""
        return sum(engine.kv_rows for engine in self.engines)

    @property
    def max_kv_rows(self) -> int:
        """Most KV rows that all engines may hold."""
        return sum(engine.info.max_kv_rows for engine in self.engines)

    @property
    def line(self) -> CostLine:
        """What the default drafter's steps take."""
        return self.drafters[self.names[0]].line

    def pick(self, name: str) -> AnyDrafter:
        """The drafter of a session; an empty name picks the default.

        Raises:
            InvalidInput: naming the unknown drafter and the known ones.
        """
        drafter = self.drafters.get(name or self.names[0])
        if drafter is None:
            raise InvalidInput.of("drafter", name, f"one of: {', '.join(self.names)}")
        return drafter


def build_catalogue(config: DraftConfig) -> Catalogue:
    """Load every drafter of a configuration, and time its steps; slow, runs on the executor's thread.

    The first model is called `model`, further ones `model:NAME` in full. `model:default` is the draft that comes
    with Paceline for the configuration's target.

    Raises:
        InvalidInput: an unknown kind of drafter, none, one named twice, a draft of another target, or a default
            draft where there is none.
        VocabularyMismatch: models whose tokenizers differ from each other or from the target's.
    """
    check_drafters(config.drafters)
    drafters: dict[str, AnyDrafter] = {}
    engines: list[Engine] = []
    models = [resolve_draft(text.partition(":")[2], config.target_model) for text in config.drafters]
    for text, model in zip(config.drafters, models, strict=True):
        engines.append(_load_trained(model, config) if is_draft(model) else load_engine(model, config.engine))
        name = text if MODEL in drafters else MODEL
        drafters[name] = drafter = ModelDrafter(engines[-1], config.engine.prefill_chunk, name)
        drafter.measure()
    _check_vocabularies(engines, config)
    tokenizer_of = partial(load_tokenizer, trust_remote_code=config.engine.trust_remote_code)
    grammars = Grammars(partial(tokenizer_of, config.target_model or models[0].partition("#")[0]), config.grammar)
    return Catalogue(drafters, tuple(engines), grammars)


def _load_trained(folder: str, config: DraftConfig) -> Engine:
    """A draft that `paceline train draft` made, on the embedding and head of its target."""
    # Table models start in a fraction of the time that torch takes to be imported.
    from paceline.train.checkpoint import load_draft_engine

    return load_draft_engine(folder, config.engine, config.target_model)


def _check_vocabularies(engines: list[Engine], config: DraftConfig) -> None:
    found = [engine.info.fingerprint for engine in engines]
    expected, whose = found[0].tokenizer, found[0].model
    if config.target_model is not None:
        tokenizer = load_tokenizer(config.target_model, trust_remote_code=config.engine.trust_remote_code)
        expected, whose = tokenizer.fingerprint, config.target_model
    for fingerprint in found:
        if fingerprint.tokenizer != expected:
            raise VocabularyMismatch(
                f"drafter model {fingerprint.model!r}: its tokenizer {fingerprint.tokenizer[:12]} "
                f"differs from {whose!r}'s {expected[:12]}",
                metadata={"field": "tokenizer", "value": fingerprint.tokenizer, "limit": expected},
            )
