"""The corpus: text files whose passages are drafted from, tokenised as the coordinator starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import require
from paceline.protocol.given_files import read_text
from paceline.sampling.suffix import NO_TOKEN, SuffixAutomaton

logger = logging.getLogger(__name__)

FIELD = "corpus"
PROGRESS_S = 5.0
"""Seconds between two lines of progress."""
PIECE_CHARACTERS = 1 << 18
"""Characters that are tokenised in one call, cut at the end of a line: so much is in memory twice."""


def load_corpus(paths: Sequence[Path], tokenizer: Tokenizer, max_tokens: int) -> SuffixAutomaton | None:
    """Tokenise files, and the files of folders, in which no name begins with a dot; None: there is none.

    Raises:
        InvalidInput: naming the file that can't be read, is not UTF-8, or brings more than `max_tokens`.
    """
    if not paths:
        return None
    corpus, told = SuffixAutomaton(), time.monotonic()
    files = [file for path in paths for file in _files(path)]
    for number, file in enumerate(files, 1):
        for piece in _pieces(read_text(FIELD, file)):
            corpus.extend(tokenizer.encode(piece, add_special_tokens=False))
            fits = len(corpus) <= max_tokens
            require(fits, FIELD, str(file), f"at most corpus_tokens = {max_tokens} with those before it")
        corpus.extend((NO_TOKEN,))
        if time.monotonic() - told > PROGRESS_S or number == len(files):
            told = time.monotonic()
            logger.info("corpus read: files=%d of %d tokens=%d", number, len(files), len(corpus))
    return corpus


def _files(path: Path) -> list[Path]:
    """A file itself; of a folder its files, in the order of their names."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))
    require(len(found) > 0, FIELD, str(path), "a file, or a folder with files")
    return found


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of whole lines, as far as lines are short enough."""
    start = 0
    while start < len(text):
        end = start + PIECE_CHARACTERS
        line = text.rfind("\n", start, end) + 1 if end < len(text) else 0
        end = line or end
        yield text[start:end]
        start = end
