"""The schedule of the engines' self-checks: two texts by ragged chunks, a tree, a rollback and a compaction."""

from __future__ import annotations

import numpy as np

from paceline.engine.features import feature_source
from paceline.engine.interface import Engine, EngineInfo, Logits, StepItem, StepPlan
from paceline.protocol.errors import InvalidInput
from paceline.protocol.features import NO_FEATURES, FeatureNeed

Texts = tuple[tuple[int, ...], tuple[int, ...]]
_LONGEST, _SHORTEST = 24, 8


def schedule_length(info: EngineInfo) -> int:
    """Tokens of each text.

    Raises:
        InvalidInput: no room for the texts.
    """
    length = min(_LONGEST, info.max_length, info.max_kv_rows // 4)
    if length < _SHORTEST:
        limit = f"room for at least {_SHORTEST} tokens, and {4 * _SHORTEST} KV rows"
        raise InvalidInput.of("max_model_len and kv_bytes", length, limit)
    return length


def run_schedule(engine: Engine, texts: Texts, need: FeatureNeed = NO_FEATURES) -> list[Logits]:
    """Logits [length, V] of two texts, the first by chunks and a rolled-back tree, the second by ragged chunks.

    `need`: hidden states that are kept meanwhile.
    """
    first, second = texts
    end = len(first)
    wrong = [(token + 1) % engine.info.fingerprint.vocab_size for token in first]
    tree = (wrong[5], first[5], wrong[6], first[6])
    steps = (
        (StepItem(0, 0, first[:3], logit_rows=(0, 1, 2)), StepItem(1, 0, second[:1], logit_rows=(0,))),
        (StepItem(0, 3, (first[3], first[4], wrong[5]), logit_rows=(0, 1)), _chunk(1, second, 1, 6)),
        (StepItem(0, 5, tree, (-1, -1, 1, 1), logit_rows=(1, 3)), _chunk(1, second, 6, 7)),
        (
            StepItem(0, 7, first[7:], kept_rows=(6, 8), logit_rows=tuple(range(end - 7))),
            _chunk(1, second, 7, end),
        ),
    )
    rows: list[list[Logits]] = [[], []]
    sessions = (0, 1)
    try:
        for session in sessions:
            engine.open(session, end + 4)
            if need.any:
                feature_source(engine).keep_features(session, need)
        for items in steps:
            for session, logits in enumerate(engine.step(StepPlan(items))):
                rows[session].append(logits.copy())
    finally:
        for session in sessions:
            engine.close(session)
    return [np.concatenate(each) for each in rows]


def _chunk(session: int, text: tuple[int, ...], start: int, end: int) -> StepItem:
    return StepItem(session, start, text[start:end], logit_rows=tuple(range(end - start)))
