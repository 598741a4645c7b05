"""Finished texts are kept for their tenant alone, and within their memory."""

from __future__ import annotations

import random

from coordinator.text.library import EVERY_TENANT, Library
from coordinator.text.matches import Matches
from paceline.protocol.proposal import CORPUS, NGRAM, SHARED
from paceline.sampling.match import Match
from paceline.sampling.suffix import NO_TOKEN, SuffixAutomaton

MIB = 1 << 20
TEXT = tuple(range(100, 160))


def drafted(library: Library, tenant: str, prompt: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Drafter and tokens of what a request of a tenant would propose."""
    matches = Matches(len(prompt), (), ngrams=True, volumes=lambda: library.volumes(tenant))
    matches.extend(prompt)
    return None if matches.best is None else (matches.best.drafter, matches.best.continuation(3))


def test_a_finished_text_drafts_for_its_own_tenant_alone() -> None:
    library = Library(sharing=("ann", "bob"), max_bytes=MIB)
    library.keep("ann", TEXT)
    assert drafted(library, "ann", (7, 103, 104)) == (SHARED, (105, 106, 107))
    assert drafted(library, "bob", (7, 103, 104)) is None
    library.keep("bob", (104, 9, 9))
    assert drafted(library, "ann", (7, 103, 104)) == (SHARED, (105, 106, 107))
    assert drafted(library, "bob", (7, 103, 104)) == (SHARED, (9, 9))


def test_nothing_is_kept_of_tenants_that_were_not_named() -> None:
    for sharing, tenant, kept in (
        ((), "ann", 0),
        (("bob",), "ann", 0),
        ((EVERY_TENANT,), "ann", 1),
        (("bob",), "", 0),
    ):
        library = Library(sharing=sharing, max_bytes=MIB)
        library.keep(tenant, TEXT)
        assert len(library.volumes(tenant)) == kept
        assert (library.used_bytes > 0) == bool(kept)


def test_the_oldest_texts_are_forgotten_first_and_memory_is_bounded() -> None:
    rng = random.Random(5)
    library = Library(sharing=(EVERY_TENANT,), max_bytes=MIB)
    library.keep("early", TEXT)
    for number in range(60):
        library.keep(f"tenant {number % 3}", [rng.randrange(50_000) for _ in range(1500)])
        assert library.used_bytes <= MIB
    assert not library.volumes("early")
    last = TEXT[::-1]
    library.keep("late", last)
    assert drafted(library, "late", last[:9]) == (SHARED, last[9:12])
    library.keep("late", [1] * MIB)
    assert library.used_bytes <= MIB, "of a text that is larger than all memory the end is kept"


def test_a_request_goes_on_when_a_text_that_it_follows_is_forgotten() -> None:
    library = Library(sharing=(EVERY_TENANT,), max_bytes=1 << 16)
    library.keep("ann", TEXT)
    matches = Matches(1, (), ngrams=True, volumes=lambda: library.volumes("ann"))
    matches.extend(TEXT[:4])
    best = matches.best
    assert isinstance(best, Match)
    assert best.drafter == SHARED
    for number in range(30):
        library.keep("bob", [*range(1000 * number, 1000 * number + 100)])
    assert not library.volumes("ann")
    matches.extend(TEXT[:6])
    assert matches.best is None


def test_a_text_that_is_kept_meanwhile_is_followed_from_there_on() -> None:
    library = Library(sharing=(EVERY_TENANT,), max_bytes=MIB)
    matches = Matches(1, (), ngrams=True, volumes=lambda: library.volumes("ann"))
    matches.extend(TEXT[:4])
    assert not matches.best
    library.keep("ann", TEXT)
    matches.extend(TEXT[:5])
    best = matches.best
    assert isinstance(best, Match)
    assert (best.length, best.following[:2]) == (5, TEXT[5:7])


def test_the_corpus_is_everybody_s_and_the_text_s_own_match_goes_first() -> None:
    library = Library(SuffixAutomaton((1, 2, 3, 4, 5, NO_TOKEN)))
    for tenant in ("ann", ""):
        assert drafted(library, tenant, (9, 2, 3)) == (CORPUS, (4, 5))
    assert drafted(library, "ann", (2, 3, 8, 2, 3)) == (NGRAM, (8, 2, 3))
