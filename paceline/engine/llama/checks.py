"""Checks of an engine that has just loaded, and a record of them, since they take longer than loading."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engine.interface import StepItem, StepPlan
from paceline.engine.llama.engine import LlamaEngine
from paceline.engine.llama.invariance import settle_shape
from paceline.engine.schedule import run_schedule, schedule_length
from paceline.llama_cpp import capi
from paceline.models.resolve import model_home
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.runtime.files import read_live, replace_text

logger = logging.getLogger(__name__)

_TOLERANCE, _FLOAT_TOLERANCE = 0.1, 1e-2
"""Of the self-check, as a share of the largest logit, for rounded weights and others; chosen, not tuned.

Where products of different shapes differ in a last bit, activations rounded to 8 bits can differ by hundredths.
"""
_MOST_RECORDS = 100
"""Records that are kept, the latest; chosen, not tuned."""


def check_engine(
    engine: LlamaEngine, ids: Sequence[int], facts: Mapping[str, Any] | None, *, is_rounded: bool
) -> str:
    """Check an engine's steps, and in reproducible mode pad its passes as far as rows need it.

    Args:
        engine: has no sessions.
        ids: of a text.
        facts: all that the outcome depends on: where they were checked before, the record of it stands; None: not
            all of that is known here.
        is_rounded: whether some weights are of a format narrower than floats.

    Returns:
        What a row's bits depend on.

    Raises:
        Unsupported: as `self_check` and `settle_shape`.
    """
    record = None if facts is None else CheckRecord(facts)
    entry = None if record is None else record.read()
    if entry is not None:
        least, invariance = entry
        engine.shape, origin = replace(engine.shape, least=least), "read from the record of an earlier start"
    else:
        self_check(engine, ids, _TOLERANCE if is_rounded else _FLOAT_TOLERANCE)
        invariance, origin = settle_shape(engine, ids), "measured"
        if record is not None:
            record.write(engine.shape.least, invariance)
    logger.info("model %s: rows are %s (%s)", engine.info.fingerprint.model, invariance, origin)
    return invariance


class CheckRecord:
    """A file in the cache folder with the outcome of one set of facts.

    It is replaced whole. Its first line is the digest of the rest: what is damaged, or of other facts, is no record.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """Name the file by `facts`, which are written as JSON."""
        self._facts = json.dumps({**facts, "code": _code_digest()}, sort_keys=True)
        self.file = model_home() / "llama-checks" / f"{_digest(self._facts)}.json"

    def read(self) -> tuple[int, str] | None:
        """The least rows of a pass, and what rows' bits depend on; None: there is no such record."""
        try:
            content = read_live("record", self.file, "JSON").decode()
        except (InvalidInput, UnicodeDecodeError):
            return None
        seal, _, body = content.partition("\n")
        if seal != _digest(body):
            return None
        entry = json.loads(body)
        return (entry["least"], entry["rows"]) if entry["facts"] == self._facts else None

    def write(self, least: int, rows: str) -> None:
        """Keep the outcome, where the folder can be written."""
        body = json.dumps({"least": least, "rows": rows, "facts": self._facts})
        folder = self.file.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(self.file, f"{_digest(body)}\n{body}")
            oldest_first = sorted(folder.glob("*.json"), key=lambda each: each.stat().st_mtime)
            for file in oldest_first[:-_MOST_RECORDS]:
                file.unlink(missing_ok=True)
        except OSError as error:
            logger.info("the next start measures again: %s: %s", folder, error.strerror)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _code_digest() -> str:
    """Digest of the sources that compute and check."""
    here = Path(__file__).parent
    sources = sorted((*here.glob("*.py"), *here.parent.glob("*.py"), Path(capi.__file__)))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()


def self_check(engine: LlamaEngine, ids: Sequence[int], tolerance: float) -> None:
    """Compare chunks, a tree, a rollback and a compaction with the same texts, a row a step.

    Raises:
        Unsupported: they differ by more than the tolerance, as a share of the largest logit.
    """
    length = schedule_length(engine.info)
    words = [*ids] * (2 * length // len(ids) + 1)
    texts = (tuple(words[:length]), tuple(words[length : 2 * length]))
    for text, rows in zip(texts, run_schedule(engine, texts), strict=True):
        plain = _row_by_row(engine, text)
        share = float(np.abs(rows - plain).max() / max(float(np.abs(plain).max()), 1e-6))
        if not share <= tolerance:
            name = engine.info.fingerprint.model
            reason = f"logits of steps differ from those of single rows by {share:.2g} of the largest"
            raise Unsupported(f"{name}: {reason}, tolerance {tolerance:g}")


def _row_by_row(engine: LlamaEngine, text: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    engine.open(0, len(text))
    try:
        steps = [StepPlan((StepItem(0, row, (token,), logit_rows=(0,)),)) for row, token in enumerate(text)]
        return np.concatenate([engine.step(plan)[0].copy() for plan in steps])
    finally:
        engine.close(0)
