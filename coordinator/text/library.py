"""The texts besides a request's own that proposals are copied from: its tenant's finished texts, and a corpus. Pure.

Nothing crosses tenants: a finished text serves only requests of the tenant that it was generated for. Within a tenant
an accepted proposal makes its request faster, so timing tells one caller of the tenant what others were answered.
Therefore the operator names the tenants whose texts are kept; by default there are none.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import require
from paceline.protocol.given_files import read_text
from paceline.protocol.proposal import CORPUS, SHARED
from paceline.runtime import clock
from paceline.sampling.suffix import MAX_TOKEN_BYTES, NO_TOKEN, SuffixAutomaton

logger = logging.getLogger(__name__)


EVERY_TENANT = "*"
VOLUMES = 4
"""Parts of the memory for finished texts. An automaton only grows, so the oldest part is dropped as a whole."""


@dataclass(frozen=True, eq=False)
class Volume:
    """Texts that are searched together; `drafter` names the proposals that are copied from them."""

    drafter: str
    text: SuffixAutomaton
    tenant: str = ""
    """The texts' tenant; empty for the corpus."""


class Library:
    """The corpus, and finished texts by tenant, of which the oldest are dropped first.

    Args:
        corpus: serves every request; None: there is none.
        sharing: tenants whose finished texts are kept, each for itself; `EVERY_TENANT`: all tenants.
        max_bytes: memory for the finished texts of all tenants together.
    """

    def __init__(
        self, corpus: SuffixAutomaton | None = None, sharing: Collection[str] = (), max_bytes: int = 0
    ) -> None:
        self._corpus = () if corpus is None else (Volume(CORPUS, corpus),)
        self._sharing = frozenset(sharing)
        self._max_bytes = max_bytes
        self._volumes: deque[Volume] = deque()

    @property
    def used_bytes(self) -> int:
        """Memory that finished texts take."""
        return sum(volume.text.used_bytes for volume in self._volumes)

    def volumes(self, tenant: str) -> tuple[Volume, ...]:
        """The volumes that a tenant's requests may copy from now."""
        return (*(volume for volume in self._volumes if volume.tenant == tenant), *self._corpus)

    def keep(self, tenant: str, tokens: Sequence[int]) -> None:
        """Keep the output of a finished request of a tenant; of a very long output its end."""
        if not tokens or self._sharing.isdisjoint((tenant, EVERY_TENANT)):
            return
        part = self._max_bytes // VOLUMES
        latest = [volume for volume in self._volumes if volume.tenant == tenant][-1:]
        if not latest or latest[0].text.used_bytes > part:
            latest = [Volume(SHARED, SuffixAutomaton(), tenant)]
            self._volumes += latest
        latest[0].text.extend((*tokens[-(part // MAX_TOKEN_BYTES) :], NO_TOKEN))
        while self.used_bytes > self._max_bytes:
            self._volumes.popleft()


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
