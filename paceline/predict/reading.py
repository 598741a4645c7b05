"""Both passes over a whole sample: what is kept is not read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.engine.interface import Engine
from paceline.predict.kept import KeptPositions
from paceline.predict.matching import match_positions
from paceline.predict.passes import SampleText, drafter_pass, needed_features, target_pass
from paceline.predict.positions import DrafterPositions, TargetPositions, TextPositions
from paceline.protocol.errors import InvalidInput
from paceline.protocol.features import NO_FEATURES, FeatureNeed
from paceline.protocol.proposal import NGRAM
from paceline.train.evaluate import Reading

TARGET = ""
"""The target's name among readers."""
Advance = Callable[[str], None]


def read_texts(
    target: Engine,
    drafters: Mapping[str, Engine],
    texts: Sequence[SampleText],
    kept: KeptPositions,
    advance: Advance = lambda done: None,
) -> list[TextPositions]:
    """Read a sample with the target and every drafter; matches in the text are always among the drafters.

    Args:
        drafters: engines by the names that reports use.
        texts: in an order that is always the same.
        kept: where positions are kept.
        advance: told of each text that has been read.

    Raises:
        Unsupported: a drafter that reads features, and a target engine that gives none.
        InvalidInput: finished texts that are less likely than any: of another tokenizer.
    """
    found: list[TextPositions] = []
    for number, text in enumerate(texts):
        found.append(_read(number, target, drafters, text, kept))
        advance(f"text {number + 1} of {len(texts)} at temperature {text.row.temperature:g}")
    check_language(found, target.info.fingerprint.vocab_size)
    return found


def _read(
    number: int, target: Engine, drafters: Mapping[str, Engine], text: SampleText, kept: KeptPositions
) -> TextPositions:
    temperature = text.row.temperature
    positions = kept.find(TargetPositions, number, temperature, TARGET)
    held = {name: kept.find(DrafterPositions, number, temperature, reader) for name, reader in _readers(drafters)}
    missing = [name for name, each in held.items() if each is None or positions is None]
    for need in {_need(name, drafters) for name in missing}:
        positions, read = target_pass(target, text, need)
        kept.keep(number, temperature, TARGET, positions)
        for name, reader in _readers(drafters):
            if name in missing and _need(name, drafters) == need:
                made = _drafted(name, drafters, text, positions, read)
                kept.keep(number, temperature, reader, made)
                held[name] = made
    assert positions is not None, "there are always matches to read, so it was read unless it was kept"
    by_name = {name: each for name, each in held.items() if each is not None}
    return TextPositions(temperature, text.own, text.row.token_ids, positions, by_name)


def _readers(drafters: Mapping[str, Engine]) -> list[tuple[str, str]]:
    """Names of drafters, and what their positions are kept under: other weights are another reader."""
    return [(NGRAM, NGRAM), *((name, f"{name} {each.info.fingerprint.numeric}") for name, each in drafters.items())]


def _need(name: str, drafters: Mapping[str, Engine]) -> FeatureNeed:
    return NO_FEATURES if name == NGRAM else needed_features(drafters[name])


def _drafted(
    name: str, drafters: Mapping[str, Engine], text: SampleText, positions: TargetPositions, read: Reading
) -> DrafterPositions:
    if name == NGRAM:
        return match_positions(text, positions, read.logits)
    return drafter_pass(drafters[name], text, positions, read)


def check_language(texts: Sequence[TextPositions], vocab_size: int) -> None:
    """Refuse finished texts that the target finds less likely than ids drawn at random.

    Raises:
        InvalidInput: naming what each token costs, in nats.
    """
    finished = [text.target.written_logprobs for text in texts if not text.own]
    if not finished:
        return
    mean, random = float(np.concatenate(finished).mean()), -float(np.log(vocab_size))
    if mean < random:
        limit = f"at least {random:.2f}, what ids drawn at random have: are these another tokenizer's ids?"
        raise InvalidInput.of("sample log-probability a token", round(mean, 2), limit)
