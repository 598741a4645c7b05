"""Which models of another tokenizer a draft service takes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from draft_service.drafters.catalogue import build_catalogue
from paceline.engine.vocabulary.engine import TranslatedEngine
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import Unsupported, VocabularyMismatch
from paceline.runtime.config import DraftConfig
from tests.models.saving import letter_tokenizer

LETTERS = "table:vocab=20"
BYTES = "table:vocab=4000,eos=97"


def test_one_of_another_tokenizer_says_the_targets(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        catalogue = build_catalogue(
            DraftConfig(drafters=(f"model:{BYTES}", f"model:{LETTERS}"), target_model=LETTERS)
        )
    assert [type(engine) is TranslatedEngine for engine in catalogue.engines] == [True, False]
    for engine in catalogue.engines:
        assert engine.info.fingerprint.tokenizer == load_tokenizer(LETTERS).fingerprint
        assert engine.info.fingerprint.vocab_size == 20
    assert "19 tokens in common, of its own 4000 and table:vocab=20's 20" in caplog.text


@pytest.mark.parametrize(
    ("drafters", "target", "message"),
    [
        (["table:vocab=2"], BYTES, r"'table:vocab=2.*' has 1 of the 255 texts of 'table:.* least 1%"),
        ([LETTERS, BYTES], None, "name the target"),
    ],
)
def test_one_with_too_little_in_common_is_refused(drafters: list[str], target: str | None, message: str) -> None:
    named = tuple(f"model:{drafter}" for drafter in drafters)
    with pytest.raises(VocabularyMismatch, match=message):
        build_catalogue(DraftConfig(drafters=named, target_model=target))


def test_a_target_whose_tokens_are_not_known_in_bytes_is_refused(tmp_path: Path) -> None:
    letter_tokenizer(97).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="neither byte-level nor SentencePiece"):
        build_catalogue(DraftConfig(drafters=(f"model:{LETTERS}",), target_model=str(tmp_path)))
