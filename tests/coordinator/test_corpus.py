"""Files become a corpus, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.text import library as corpus_module
from coordinator.text.library import load_corpus
from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.proposal import CORPUS
from paceline.sampling.suffix import FollowedText, SuffixAutomaton

TOKENIZER = TableTokenizer(300, None)


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
    monkeypatch.setattr(corpus_module, "PIECE_CHARACTERS", 33)
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


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a file, or a folder with files"):
        load_corpus([tmp_path], TOKENIZER, 100)
