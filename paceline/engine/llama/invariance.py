"""How far a row's bits depend on its company, measured: kernels differ by the number of rows, and promise nothing.

The text is compared with itself, computed a row a step: in steps of several widths, behind a short text and behind
one so long that llama.cpp divides it between threads, after a tree, and beside another session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from paceline.engine.interface import Engine, Logits, StepItem, StepPlan
from paceline.engine.llama.engine import LlamaEngine
from paceline.protocol.errors import Overloaded, Unsupported
from paceline.protocol.proposal import ROOT

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
SHORT, LONG = 24, 600
"""Tokens before the compared rows; from 512 on, threads share the keys of a row that is alone in its step."""
ALIKE = "alike"


def settle_shape(engine: LlamaEngine, text: Sequence[int]) -> str:
    """Measure what a row's bits depend on; in reproducible mode pad passes until it is nothing.

    Two rows are enough where only single rows are computed otherwise, as keys past 512 are by several threads.

    Args:
        engine: has no sessions.
        text: at least one token; repeated as far as needed.

    Raises:
        Unsupported: in reproducible mode, if rows differ in passes that are all of one width.
    """
    if not engine.shape.alone:
        return row_invariance(engine, text)
    further, pending = [2, engine.shape.rows], _lengths(engine)
    while pending:
        length = pending.pop()
        with _behind(engine, text, length) as tokens:
            while (steps := next(_differing_steps(engine, tokens, length), None)) is not None:
                if not further:
                    reason = f"with this library padded rows are other than alone: {steps} behind {length} tokens"
                    raise Unsupported(f"reproducible mode: {reason}")
                engine.shape = replace(engine.shape, least=further.pop(0))
                pending = [each for each in _lengths(engine) if each != length]
    return f"{ALIKE}, in passes of {engine.shape.least} to {engine.shape.rows} rows"


def row_invariance(engine: Engine, text: Sequence[int]) -> str:
    """`ALIKE`, or all steps in which rows have other bits than in steps of one row; equal on equal machines."""
    differences: list[str] = []
    for length in _lengths(engine):
        with _behind(engine, text, length) as tokens:
            differences += (f"{steps} behind {length} tokens" for steps in _differing_steps(engine, tokens, length))
    return f"other than alone: {'; '.join(differences)}" if differences else ALIKE


def _lengths(engine: Engine) -> list[int]:
    room = min(engine.info.max_length, engine.info.max_kv_rows // 2) - WIDTHS[-1]
    return sorted({min(length, room) for length in (SHORT, LONG)})


@contextmanager
def _behind(engine: Engine, text: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """A session with rows of a text; yields its tokens, to the last of those that are compared."""
    total = length + WIDTHS[-1]
    tokens = tuple((*text,) * (total // len(text) + 1))[:total]
    engine.open(0, total)
    try:
        engine.step(StepPlan((StepItem(0, 0, tokens[:length]),)))
        yield tokens
    finally:
        engine.close(0)


def _differing_steps(engine: Engine, tokens: Sequence[int], length: int) -> Iterator[str]:
    """The steps in which rows behind so many differ, the cheapest to find first."""
    rows = tuple(tokens[length:])
    alone = [_step(engine, StepItem(0, length + i, (token,), logit_rows=(0,)))[0] for i, token in enumerate(rows)]
    widths: list[int] = []
    for width in WIDTHS:
        item = StepItem(0, length, rows[:width], logit_rows=tuple(range(width)))
        if not np.array_equal(_step(engine, item), alone[:width]):
            widths.append(width)
    if widths:
        yield f"in steps of {', '.join(map(str, widths))} rows"
    last = StepItem(0, length, rows, logit_rows=(len(rows) - 1,))
    if not np.array_equal(_step(engine, last)[0], alone[-1]):
        yield "with one row's logits of many"
    if not np.array_equal(_after_tree(engine, rows, length), alone[2]):
        yield "after a tree"
    # The library reads every session's cells alike, so a short text shows it.
    if length <= SHORT and any(not np.array_equal(each, alone[0]) for each in _in_company(engine, tokens, length)):
        yield "beside another session"


def _after_tree(engine: Engine, rows: Sequence[int], length: int) -> Logits:
    """Logits of the third row, behind two that were not neighbours in their step."""
    other = rows[2]
    _step(engine, StepItem(0, length, (other, rows[0], other, rows[1]), (ROOT, ROOT, 0, 1)))
    item = StepItem(0, length + 2, (rows[2],), kept_rows=(length + 1, length + 3), logit_rows=(0,))
    logits: Logits = _step(engine, item)[0]
    return logits


def _in_company(engine: Engine, tokens: Sequence[int], length: int) -> Iterator[Logits]:
    """Logits of the first row, in a step with another session's; none where no other may be open."""
    try:
        engine.open(1, length + 1)
    except Overloaded:
        return
    try:
        engine.step(StepPlan((StepItem(1, 0, tuple(tokens[:length])),)))
        items = tuple(StepItem(each, length, (tokens[length],), logit_rows=(0,)) for each in (1, 0))
        yield engine.step(StepPlan(items))[1][0].copy()
    finally:
        engine.close(1)


def _step(engine: Engine, item: StepItem) -> Logits:
    return engine.step(StepPlan((item,)))[0].copy()
