"""The schedule of the engines' self-checks: two texts by ragged chunks, a tree, a rollback and a compaction."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from paceline.engine.features import feature_source
from paceline.engine.interface import Engine, EngineInfo, Logits, StepItem, StepPlan
from paceline.protocol.errors import InvalidInput, Overloaded
from paceline.protocol.features import NO_FEATURES, FeatureNeed

logger = logging.getLogger(__name__)

Texts = tuple[tuple[int, ...], tuple[int, ...]]
_LONGEST, _SHORTEST = 24, 8


def schedule_length(info: EngineInfo) -> int:
    """Tokens of each text.

    Raises:
        InvalidInput: no room for the texts.
    """
    length = min(_LONGEST, info.max_length, max(0, info.most_rows // 4))
    if length < _SHORTEST:
        limit = f"room for at least {_SHORTEST} tokens, and {4 * _SHORTEST} KV rows"
        raise InvalidInput.of("max_model_len and kv_bytes", length, limit)
    return length


def run_schedule(engine: Engine, texts: Texts, need: FeatureNeed = NO_FEATURES) -> list[Logits]:
    """Logits [length, V] of two texts, the first by chunks and a rolled-back tree, the second by ragged chunks.

    Both share steps, unless the engine has but one session at once.

    `need`: hidden states that are kept meanwhile.
    """
    first, second = texts
    end = len(first)
    wrong = [(token + 1) % engine.info.fingerprint.vocab_size for token in first]
    other = (first[6] + 2) % engine.info.fingerprint.vocab_size
    tree = (wrong[5], first[5], wrong[6], first[6], other)
    steps = (
        (StepItem(0, 0, first[:3], logit_rows=(0, 1, 2)), StepItem(1, 0, second[:1], logit_rows=(0,))),
        (StepItem(0, 3, (first[3], first[4], wrong[5]), logit_rows=(0, 1)), _chunk(1, second, 1, 6)),
        (StepItem(0, 5, tree, (-1, -1, 1, 1, 1), logit_rows=(1, 3)), _chunk(1, second, 6, 7)),
        (
            StepItem(0, 7, first[7:], kept_rows=(6, 8), logit_rows=tuple(range(end - 7))),
            _chunk(1, second, 7, end),
        ),
    )
    rows: dict[int, list[Logits]] = {0: [], 1: []}
    for sessions in _open_sessions(engine, end + 4):
        try:
            for session in sessions if need.any else ():
                feature_source(engine).keep_features(session, need)
            for items in steps:
                own = tuple(item for item in items if item.session in sessions)
                for item, logits in zip(own, engine.step(StepPlan(own)) if own else (), strict=True):
                    rows[item.session].append(logits.copy())
        finally:
            for session in sessions:
                engine.close(session)
    return [np.concatenate(each) for each in rows.values()]


def _open_sessions(engine: Engine, max_rows: int) -> Iterator[tuple[int, ...]]:
    """Open both sessions, or one after the other where no more may be open at once; closing them is the caller's."""
    engine.open(0, max_rows)
    try:
        engine.open(1, max_rows)
    except Overloaded as error:
        logger.info("checked a session at a time: %s", error.message)
        yield (0,)
        engine.open(1, max_rows)
        yield (1,)
    else:
        yield (0, 1)


def _chunk(session: int, text: tuple[int, ...], start: int, end: int) -> StepItem:
    return StepItem(session, start, text[start:end], logit_rows=tuple(range(end - start)))
