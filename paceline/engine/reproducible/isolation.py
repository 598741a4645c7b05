"""What reproducible mode rests on, tried out at start-up on the model, the threads and the libraries at hand.

A row's bits may not depend on its index in a decode pass, on what else is in
the pass, on a tree around it, or on which part of a prompt's chunk came before.
Kernels promise none of this, so a machine where it doesn't hold is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.engine.interface import Engine, Logits, Prefix, StepItem, StepPlan
from paceline.engine.reproducible.shapes import BUCKET_ROWS
from paceline.protocol.errors import Unsupported
from paceline.protocol.proposal import ROOT

_PROMPT = 12
_ROWS = 8


def isolation_check(engine: Engine, decode_rows: int) -> None:
    """Compare the bits of one text's logits over its possible schedules.

    Raises:
        Unsupported: naming the schedules that differ.
    """
    length = min(_PROMPT + _ROWS, engine.info.max_length)
    generator = np.random.default_rng(0)
    text = tuple(int(token) for token in generator.integers(engine.info.fingerprint.vocab_size, size=length))
    alone = _text_logits(engine, text, [[end] for end in range(_PROMPT, length)], (_PROMPT,))
    whole = _text_logits(engine, text, [[*range(_PROMPT, length)]], (_PROMPT // 2, _PROMPT))
    _require_equal("one row a step and a whole round", alone, whole)
    for index, logits in enumerate(_side_by_side(engine, text, decode_rows)):
        _require_equal(f"alone and at row {index} of a step", alone[0], logits)
    _require_equal("a chain and a tree", alone[:2], _in_a_tree(engine, text))


def _text_logits(
    engine: Engine, text: Sequence[int], rounds: Sequence[Sequence[int]], chunks: Sequence[int]
) -> Logits:
    """Logits of the rows behind the prompt, by rounds, after a prompt by chunks."""
    _open(engine, text, chunks)
    found = []
    for rows in rounds:
        tokens = tuple(text[row] for row in rows)
        (logits,) = engine.step(StepPlan((StepItem(0, rows[0], tokens, logit_rows=tuple(range(len(rows)))),)))
        found.append(logits.copy())
    engine.close(0)
    return np.concatenate(found)


def _side_by_side(engine: Engine, text: Sequence[int], decode_rows: int) -> Logits:
    """The first row behind the prompt, as every row of a full pass at once: a tree of so many equal branches."""
    _open(engine, text, (_PROMPT,))
    rows = tuple(range(decode_rows))
    item = StepItem(0, _PROMPT, (text[_PROMPT],) * decode_rows, (ROOT,) * decode_rows, logit_rows=rows)
    (logits,) = engine.step(StepPlan((item,)))
    found = logits.copy()
    engine.close(0)
    return found


def _in_a_tree(engine: Engine, text: Sequence[int]) -> Logits:
    """The first two rows behind the prompt, as the last branch of a tree."""
    other = (text[_PROMPT] + 1) % engine.info.fingerprint.vocab_size
    _open(engine, text, (_PROMPT,))
    tokens = (other, text[_PROMPT], other, text[_PROMPT + 1])
    item = StepItem(0, _PROMPT, tokens, (ROOT, ROOT, 0, 1), logit_rows=(1, 3))
    (logits,) = engine.step(StepPlan((item,)))
    found = logits.copy()
    engine.close(0)
    return found


def _open(engine: Engine, text: Sequence[int], chunks: Sequence[int]) -> None:
    engine.open(0, BUCKET_ROWS, Prefix(prompt_rows=_PROMPT))
    start = 0
    for end in chunks:
        engine.step(StepPlan((StepItem(0, start, tuple(text[start:end])),)))
        start = end


def _require_equal(what: str, first: Logits, second: Logits) -> None:
    differing = int((first != second).sum())
    if differing or not np.isfinite(first).all():
        raise Unsupported(
            f"reproducible mode: on this machine {what} give different bits ({differing} of {first.size} logits)"
        )
