"""The drafters of a service, by the names that sessions use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from draft_service.drafters.interface import AnyDrafter
from draft_service.drafters.model import ModelDrafter
from paceline.costs.cost_line import CostLine
from paceline.costs.service_costs import DEFAULT, LineKey
from paceline.drafters.names import check_drafters
from paceline.engine.interface import Engine
from paceline.engine.loading import load_engine
from paceline.engine.vocabulary.engine import translate_engine
from paceline.grammars.sessions import Grammars
from paceline.models.resolve import is_draft, resolve_draft
from paceline.models.tokenizer import Tokenizer, load_tokenizer
from paceline.protocol.errors import InvalidInput, VocabularyMismatch, require
from paceline.protocol.features import FeatureNeed
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.proposal import MAX_DRAFTER_BYTES, MODEL, OWN_MTP
from paceline.runtime.config import DraftConfig


@dataclass(frozen=True)
class Catalogue:
    """Drafters by name, the default first, with their engines.

    `grammars` follows the sessions' grammars; None: nobody does. `default_name` is a second name of the default
    drafter, the one in the configuration; empty: that name is too long for a message.
    """

    drafters: Mapping[str, AnyDrafter]
    engines: tuple[Engine, ...]
    grammars: Grammars | None = None
    default_name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The drafters' names, the default first."""
        return tuple(self.drafters)

    @property
    def needs(self) -> tuple[FeatureNeed, ...]:
        """The hidden states of the target that each drafter reads, in the order of the names."""
        return tuple(drafter.manifest.need for drafter in self.drafters.values())

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
        """The number of KV rows in use in all engines."""
        return sum(engine.kv_rows for engine in self.engines)

    @property
    def max_kv_rows(self) -> int:
        """Most KV rows that all engines may hold."""
        return sum(engine.info.max_kv_rows for engine in self.engines)

    @property
    def lines(self) -> Mapping[LineKey, CostLine]:
        """The cost lines of each drafter, with steps beside the target's where there were any; the default's name is
        empty.
        """
        drafters = {DEFAULT if name == self.names[0] else name: self.drafters[name] for name in self.names}
        beside = {(name, True): each.line_beside for name, each in drafters.items() if each.line_beside.is_known}
        return {**{(name, False): each.line for name, each in drafters.items()}, **beside}

    def pick(self, name: str) -> AnyDrafter:
        """The drafter of a session; an empty name, or its own, picks the default.

        Raises:
            InvalidInput: naming the unknown drafter and the known ones.
        """
        drafter = self.drafters.get(self.names[0] if name in ("", self.default_name) else name)
        if drafter is None:
            raise InvalidInput.of("drafter", name, f"one of: {', '.join(self.names)}")
        return drafter


def build_catalogue(config: DraftConfig) -> Catalogue:
    """Load every drafter of a configuration and time its steps. It is slow and runs on the executor's thread.

    If the target is named, a model with another tokenizer drafts in the tokens that both vocabularies have.

    A model's name is `model:NAME`; the first one is named `model`, too. `model:default` is the default draft of the
    configuration's target, `model:mtp` the target's own multi-token prediction.

    Raises:
        InvalidInput: an unknown kind of drafter, no drafter, one named twice, a draft of another target, or a
            default draft where there is none.
        VocabularyMismatch: models whose tokenizers differ from each other, or have too little in common with the
            target's, or another target's draft.
    """
    check_drafters(config.drafters)
    drafters: dict[str, AnyDrafter] = {}
    engines: list[Engine] = []
    models = [resolve_draft(text.partition(":")[2], config.target_model) for text in config.drafters]
    tokenizer_of = partial(load_tokenizer, trust_remote_code=config.engine.trust_remote_code)
    target = None if config.target_model is None else tokenizer_of(config.target_model)
    for text, model in zip(config.drafters, models, strict=True):
        engines.append(_load(model, config, target))
        name = text if MODEL in drafters else MODEL
        drafters[name] = drafter = ModelDrafter(engines[-1], config.engine.prefill_chunk, name)
        drafter.measure()
    _check_vocabularies(engines, config, target)
    grammars = Grammars(partial(tokenizer_of, config.target_model or models[0].partition("#")[0]), config.grammar)
    first = config.drafters[0]
    default_name = first if len(first.encode("utf-8", "surrogatepass")) <= MAX_DRAFTER_BYTES else ""
    return Catalogue(drafters, tuple(engines), grammars, default_name)


def _load(model: str, config: DraftConfig, target: Tokenizer | None) -> Engine:
    """Load the engine of a draft by `paceline train draft`, of a draft of another kind, or of a model."""
    if model != OWN_MTP and not Path(model).expanduser().is_dir():
        return _load_model(model, config, target)
    require(config.engine.engine != "llama", "engine", "llama", f"auto or torch for drafter model:{model}, a folder")
    if model == OWN_MTP:
        return _load_own_mtp(config)
    if is_draft(model):
        return _load_trained(model, config)
    return _load_by_kind(Path(model).expanduser(), config) or _load_model(model, config, target)


def _load_by_kind(folder: Path, config: DraftConfig) -> Engine | None:
    """Load the engine of a folder whose draft reads the target's features; None: it is none of these kinds."""
    from paceline.drafters.formats.kinds import kind_of, load_kind

    kind = kind_of(folder)
    return None if kind is None else load_kind(kind, folder, config.target_model, config.engine)


def _load_own_mtp(config: DraftConfig) -> Engine:
    """The multi-token prediction of the target's own checkpoint."""
    from paceline.drafters.formats.kinds import load_own
    from paceline.drafters.formats.target_weights import TargetWeights

    target = config.target_model
    if target is None:
        raise InvalidInput.of("target_model", target, f"given: model:{OWN_MTP} is in the target's own checkpoint")
    return load_own(TargetWeights.load(target, config.engine), config.engine)


def _load_trained(folder: str, config: DraftConfig) -> Engine:
    """A draft that `paceline train draft` made, on the embedding and head of its target."""
    # Table models start in a fraction of the time that torch takes to be imported.
    from paceline.drafters.layers.stack import load_draft_engine

    return load_draft_engine(folder, config.engine, config.target_model)


def _load_model(model: str, config: DraftConfig, target: Tokenizer | None) -> Engine:
    """A model of the target's tokenizer, or of another one."""
    engine = load_engine(model, config.engine)
    if config.target_model is None or target is None or _is_of(engine.info.fingerprint, target):
        return engine
    own = load_tokenizer(model.partition("#")[0], trust_remote_code=config.engine.trust_remote_code)
    return translate_engine(engine, own, target, config.engine, config.target_model)


def _is_of(fingerprint: Fingerprint, target: Tokenizer) -> bool:
    """Whether a model has the target's ids, and logits for as many of them."""
    return (fingerprint.tokenizer, fingerprint.vocab_size) == (target.fingerprint, target.vocab_size)


def _check_vocabularies(engines: list[Engine], config: DraftConfig, target: Tokenizer | None) -> None:
    """Check that all drafters have the target's tokenizer or, where no target is named, the same one.

    Raises:
        VocabularyMismatch: naming the first one that differs.
    """
    fingerprints = [engine.info.fingerprint for engine in engines]
    tokenizer, whose = fingerprints[0].tokenizer, fingerprints[0].model
    if target is not None:
        tokenizer, whose = target.fingerprint, str(config.target_model)
    for fingerprint in fingerprints:
        if fingerprint.tokenizer != tokenizer:
            remedy = "" if target is not None else "; name the target (target_model) that both are to draft for"
            raise VocabularyMismatch(
                f"drafter model {fingerprint.model!r}: its tokenizer {fingerprint.tokenizer[:12]} "
                f"differs from {whose!r}'s {tokenizer[:12]}{remedy}",
                metadata={"field": "tokenizer", "value": fingerprint.tokenizer, "limit": tokenizer},
            )
