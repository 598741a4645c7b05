"""Finished texts are kept for their tenant alone, and within their memory; files become a corpus, or are refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from coordinator.text import library as library_module
from coordinator.text.library import EVERY_TENANT, Library, load_corpus
from coordinator.text.matches import Matches
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.proposal import CORPUS, NGRAM, SHARED
from paceline.sampling.match import Match
from paceline.sampling.suffix import NO_TOKEN, FollowedText, SuffixAutomaton

MIB = 1 << 20
TEXT = tuple(range(100, 160))
TOKENIZER = TableTokenizer(300, None)


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
    for sharing, tenant, kept in ((), "ann", 0), (("bob",), "ann", 0), ((EVERY_TENANT,), "ann", 1), (("bob",), "", 0):
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


def following(text: SuffixAutomaton | None, before: str) -> str:
    assert text is not None
    followed = FollowedText(text, CORPUS)
    followed.extend(TOKENIZER.encode(before))
    match = followed.match()
    return "" if match is None else TOKENIZER.decode(match.following)


def test_files_and_folders_are_read_and_hidden_files_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "deep" / "one.md").write_text("to be or not to see")
    (folder / ".git" / "secret").write_text("hidden treasure")
    (tmp_path / "two.txt").write_text("Größe und Würde")
    found = load_corpus([folder, tmp_path / "two.txt"], TOKENIZER, 1000)
    assert following(found, "or not") == " to see", "and nothing of the next file"
    assert following(found, "Grö") == "ße und Würde"
    assert following(found, "hidden t") != "reasure"
    assert load_corpus([], TOKENIZER, 1000) is None


def test_a_text_in_pieces_is_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {number} of many\n" for number in range(40)) + 60 * "x" + "the end"
    (tmp_path / "long.txt").write_text(text)
    whole = load_corpus([tmp_path], TOKENIZER, 5000)
    monkeypatch.setattr(library_module, "PIECE_CHARACTERS", 33)
    pieces = load_corpus([tmp_path], TOKENIZER, 5000)
    assert whole is not None
    assert pieces is not None
    assert len(whole) == len(pieces) == len(text) + 1
    rest = " many\nline 39 of many\n" + 60 * "x" + "the end"
    assert following(pieces, "line 38 of") == following(whole, "line 38 of") == rest


@pytest.mark.parametrize(
    ("name", "content", "limit"),
    [
        ("missing.txt", None, "a readable UTF-8 file"),
        ("latin.txt", b"caf\xe9", "in position 3"),
        ("large.txt", b"x" * 101, "at most corpus_tokens = 100 with those before it"),
    ],
)
def test_a_file_that_can_t_be_used_is_named(tmp_path: Path, name: str, content: bytes | None, limit: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidInput) as refused:
        load_corpus([file], TOKENIZER, 100)
    assert str(refused.value).startswith("corpus = ")
    assert name in str(refused.value)
    assert limit in str(refused.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="a file, or a folder with files"):
        load_corpus([tmp_path / "empty"], TOKENIZER, 100)
