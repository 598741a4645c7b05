"""Both passes over a whole sample: positions in the cache are not read again, whoever reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from paceline.engine.interface import Engine
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.proposal import NGRAM
from paceline_lab.predict.matching import match_positions
from paceline_lab.predict.passes import SampleText, chances_of, drafter_pass, needed_features, target_pass
from paceline_lab.predict.positions import DrafterPositions, TargetPositions, TextPositions
from paceline_lab.predict.positions_cache import PositionsCache
from paceline_training.corpus import TokenIds
from paceline_training.evaluate import Reading
from paceline_training.writing import Author, GenerationRecipe, Writer

TARGET = ""
"""The target's name among readers."""
Advance = Callable[[str], None]


class PassSource(Protocol):
    """A target and its drafters, as they read and write: engines on this machine, or services that run."""

    folder: str
    """Folder of the cache: sources that know less than others have another one."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the target."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest text."""

    @property
    def readers(self) -> Mapping[str, str]:
        """Names of readers in the cache, by drafter, matches first: other weights are another reader."""

    def author(self, tokenizer: Tokenizer, recipe: GenerationRecipe, prompts: tuple[TokenIds, ...]) -> Author:
        """The target as it answers prompts, as many at once as there is room for and the recipe allows."""

    def read(
        self, text: SampleText, drafters: Collection[str]
    ) -> Iterator[tuple[str, TargetPositions | DrafterPositions]]:
        """Read a text: positions of `TARGET` come before the drafters', and may come several times.

        Raises:
            Unsupported: a drafter that reads features, and a target that gives none.
        """


class EnginePasses:
    """Passes on this machine, by engines as services have them.

    Args:
        target: the target's engine.
        drafters: engines of drafters, by the names that reports use.
    """

    folder = "positions"

    def __init__(self, target: Engine, drafters: Mapping[str, Engine]) -> None:
        self._target, self._drafters = target, drafters

    @property
    def fingerprint(self) -> Fingerprint:  # noqa: D102
        return self._target.info.fingerprint

    @property
    def max_length(self) -> int:  # noqa: D102
        return self._target.info.max_length

    @property
    def readers(self) -> Mapping[str, str]:  # noqa: D102
        drafters = {name: f"{name} {each.info.fingerprint.numeric}" for name, each in self._drafters.items()}
        return {NGRAM: NGRAM, **drafters}

    def author(self, tokenizer: Tokenizer, recipe: GenerationRecipe, prompts: tuple[TokenIds, ...]) -> Author:  # noqa: D102
        info = self._target.info
        fitting = max(1, min(recipe.batch_rows, info.max_kv_rows // (recipe.max_length + info.session_rows)))
        return Writer(self._target, tokenizer, replace(recipe, batch_rows=fitting), prompts)

    def read(  # noqa: D102
        self, text: SampleText, drafters: Collection[str]
    ) -> Iterator[tuple[str, TargetPositions | DrafterPositions]]:
        for need in {self._need(name) for name in drafters}:
            positions, read = target_pass(self._target, text, need)
            yield TARGET, positions
            for name in drafters:
                if self._need(name) == need:
                    yield name, self._drafted(name, text, positions, read)

    def _need(self, name: str) -> FeatureNeed:
        return NO_FEATURES if name == NGRAM else needed_features(self._drafters[name])

    def _drafted(self, name: str, text: SampleText, positions: TargetPositions, read: Reading) -> DrafterPositions:
        if name == NGRAM:
            return match_positions(text, positions, lambda place: chances_of(read.logits[place], text.params))
        return drafter_pass(self._drafters[name], text, positions, read)


def read_texts(
    source: PassSource,
    texts: Sequence[SampleText],
    cache: PositionsCache,
    advance: Advance = lambda done: None,
) -> list[TextPositions]:
    """Read a sample with the target and every drafter; matches in the text are always among the drafters.

    Args:
        source: reads texts.
        texts: texts, in an order that is always the same.
        cache: has positions that were read before, and gets those that are read now.
        advance: called with each text that has been read.

    Raises:
        PacelineError: as `PassSource.read`.
        InvalidInput: finished texts that are less likely than any: of another tokenizer.
    """
    positions: list[TextPositions] = []
    for number, text in enumerate(texts):
        positions.append(_read(number, source, text, cache))
        advance(f"text {number + 1} of {len(texts)} at temperature {text.row.temperature:g}")
    check_language(positions, source.fingerprint.vocab_size)
    return positions


def _read(number: int, source: PassSource, text: SampleText, cache: PositionsCache) -> TextPositions:
    temperature, readers = text.row.temperature, source.readers
    target = cache.find(TargetPositions, number, temperature, TARGET)
    drafters = {name: cache.find(DrafterPositions, number, temperature, reader) for name, reader in readers.items()}
    missing = [name for name, each in drafters.items() if each is None or target is None]
    for name, positions in source.read(text, missing) if missing else ():
        cache.put(number, temperature, readers.get(name, TARGET), positions)
        if isinstance(positions, TargetPositions):
            target = positions
        else:
            drafters[name] = positions
    assert target is not None, "there are always matches to read, so it was read unless the cache had it"
    by_name = {name: each for name, each in drafters.items() if each is not None}
    return TextPositions(temperature, text.own, text.row.token_ids, target, by_name)


def shown_name(model: str) -> str:
    """Return a model's name without the folders of its machine."""
    return model.rstrip("/").rpartition("/")[2] or model


def check_language(texts: Sequence[TextPositions], vocab_size: int) -> None:
    """Refuse finished texts that the target finds less likely than ids drawn at random.

    Raises:
        InvalidInput: it names the mean log-probability of a token, in nats.
    """
    logprobs = [text.target.written_logprobs for text in texts if not text.own]
    if not logprobs:
        return
    mean, random = float(np.concatenate(logprobs).mean()), -float(np.log(vocab_size))
    if mean < random:
        limit = f"at least {random:.2f}, what ids drawn at random have: are these another tokenizer's ids?"
        raise InvalidInput.of("sample log-probability a token", round(mean, 2), limit)
