"""The corpus: text files that proposals are copied from. They are tokenised when the coordinator starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import require
from paceline.protocol.given_files import read_text
from paceline.runtime import clock
from paceline.sampling.suffix import NO_TOKEN, SuffixAutomaton

logger = logging.getLogger(__name__)

FIELD = "corpus"
PROGRESS_S = 5.0
"""Seconds between two lines of progress."""
PIECE_CHARACTERS = 1 << 18
"""Most characters that are tokenised in one call; a piece ends at a line's end. So much text is in memory twice."""


def load_corpus(paths: Sequence[Path], tokenizer: Tokenizer, max_tokens: int) -> SuffixAutomaton | None:
    """Tokenise files and the files of folders, without those whose path has a name with a leading dot.

    Returns None where there are no paths.

    Raises:
        InvalidInput: naming the file that can't be read, is not UTF-8, or brings more than `max_tokens`.
    """
    if not paths:
        return None
    corpus, logged_at = SuffixAutomaton(), clock.now()
    files = [file for path in paths for file in _files(path)]
    for number, file in enumerate(files, 1):
        for piece in _pieces(read_text(FIELD, file)):
            corpus.extend(tokenizer.encode(piece, add_special_tokens=False))
            fits = len(corpus) <= max_tokens
            require(fits, FIELD, str(file), f"at most corpus_tokens = {max_tokens} with those before it")
        corpus.extend((NO_TOKEN,))
        if clock.now() - logged_at > PROGRESS_S or number == len(files):
            logged_at = clock.now()
            logger.info("corpus read: files=%d of %d tokens=%d", number, len(files), len(corpus))
    return corpus


def _files(path: Path) -> list[Path]:
    """The file itself, or a folder's files in the order of their names."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))
    require(len(files) > 0, FIELD, str(path), "a file, or a folder with files")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces of whole lines; a line longer than a piece is cut, too."""
    start = 0
    while start < len(text):
        end = start + PIECE_CHARACTERS
        line = text.rfind("\n", start, end) + 1 if end < len(text) else 0
        end = line or end
        yield text[start:end]
        start = end
