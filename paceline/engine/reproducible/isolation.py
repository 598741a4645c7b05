"""The assumptions of reproducible mode, tested at start-up on the model, the threads and the libraries at hand.

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
"""Tokens of the prompt; its passes cover two chunks."""
_ROWS = 8
"""Rows behind it; both chosen, not tuned."""


def isolation_check(engine: Engine, decode_rows: int) -> None:
    """Compare the bits of one text's logits over its possible schedules.

    Raises:
        Unsupported: naming the schedules that differ.
    """
    length = min(_PROMPT + _ROWS, engine.info.max_length)
    vocab_size = engine.info.fingerprint.vocab_size
    generator = np.random.default_rng(0)
    text = tuple(int(token) for token in generator.integers(vocab_size, size=length))
    prompt, answer = text[:_PROMPT], text[_PROMPT:]
    one_by_one = [StepItem(0, _PROMPT + row, (token,), logit_rows=(0,)) for row, token in enumerate(answer)]
    round_ = StepItem(0, _PROMPT, answer, logit_rows=tuple(range(len(answer))))
    # The first row behind the prompt as every row of a full pass: a tree of so many equal branches.
    rows = tuple(range(decode_rows))
    equal_branches = StepItem(0, _PROMPT, answer[:1] * decode_rows, (ROOT,) * decode_rows, logit_rows=rows)
    # The first two rows behind the prompt as the last branch of a tree.
    other = (answer[0] + 1) % vocab_size
    tree = StepItem(0, _PROMPT, (other, answer[0], other, answer[1]), (ROOT, ROOT, 0, 1), logit_rows=(1, 3))

    alone = _logits(engine, (prompt,), one_by_one)
    half = _PROMPT // 2
    _require_equal(
        "one row a step and a whole round", alone, _logits(engine, (prompt[:half], prompt[half:]), [round_])
    )
    for index, logits in enumerate(_logits(engine, (prompt,), [equal_branches])):
        _require_equal(f"alone and at row {index} of a step", alone[0], logits)
    _require_equal("a chain and a tree", alone[:2], _logits(engine, (prompt,), [tree]))


def _logits(engine: Engine, chunks: Sequence[tuple[int, ...]], items: Sequence[StepItem]) -> Logits:
    """All logits that some items ask for, each a step of its own, after a prompt by chunks."""
    engine.open(0, BUCKET_ROWS, Prefix(prompt_rows=_PROMPT))
    start = 0
    for chunk in chunks:
        engine.step(StepPlan((StepItem(0, start, chunk),)))
        start += len(chunk)
    rows = [engine.step(StepPlan((item,)))[0].copy() for item in items]
    engine.close(0)
    return np.concatenate(rows)


def _require_equal(what: str, first: Logits, second: Logits) -> None:
    differing = int((first != second).sum())
    if differing or not np.isfinite(first).all():
        raise Unsupported(
            f"reproducible mode: on this machine {what} give different bits ({differing} of {first.size} logits)"
        )
