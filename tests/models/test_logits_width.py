"""Tokenizers with more ids than the model has logits for, and end ids that stand in one file alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_service.drafters.catalogue import build_catalogue
from paceline.engine.loading import load_engine
from paceline.models.token_texts import token_texts
from paceline.models.tokenizer import load_tokenizer
from paceline.protocol.errors import InvalidInput
from paceline.protocol.sampling import Grammar, GrammarKind
from paceline.runtime.config import DraftConfig
from paceline.sampling import processors
from paceline.sampling.grammar import TokenTable, Vocabulary
from tests.engine import tiny
from tests.engine.tiny import THREAD, chain, step
from tests.models.saving import byte_level_tokenizer

WIDTH = 258
"""Two special tokens and 256 bytes; the next ids have no logits."""
IMAGE, PLAIN = 258, 259


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("wide"), WIDTH)


def written(folder: Path, width: int) -> Path:
    """A model of so many logits whose tokenizer has two ids more than bytes."""
    tiny.random_model(tiny.llama(vocab_size=width)).save_pretrained(folder)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.add_tokens(["<plain>"])
    tokenizer.save_pretrained(folder)
    return folder


def test_the_vocabulary_is_what_there_are_logits_for(folder: Path) -> None:
    tokenizer, engine = load_tokenizer(str(folder)), load_engine(str(folder), THREAD)
    assert tokenizer.vocab_size == engine.info.fingerprint.vocab_size == WIDTH
    assert tokenizer.fingerprint == engine.info.fingerprint.tokenizer
    assert tokenizer.encode("a<image><plain>")[1:] == (IMAGE, PLAIN)
    assert tokenizer.decode((66, PLAIN)).startswith("a")
    assert not {IMAGE, PLAIN} & {*tokenizer.added_tokens.values(), *tokenizer.hidden_tokens}
    texts = token_texts(tokenizer)
    assert max(texts.texts) < texts.vocab_size == WIDTH
    engine.open(1, 4)
    assert step(engine, chain(1, 0, (5, 6))).shape == (2, WIDTH)
    with pytest.raises(InvalidInput, match=rf"token id = {IMAGE}: must be in \[0, {WIDTH}\)"):
        step(engine, chain(1, 2, (IMAGE,)))
    step(engine, chain(1, 2, (7,)))


def test_a_grammar_never_allows_them(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    table = TokenTable(Vocabulary.of(tokenizer))

    def mask_of(expression: str) -> Any:
        packed = table.compile(Grammar(GrammarKind.REGEX, expression)).next_token_mask()
        return processors._unpack(packed, tokenizer.vocab_size)

    assert np.flatnonzero(mask_of("[ab]+")).tolist() == list(tokenizer.encode("ab"))
    assert mask_of("(?s:.)*").size == WIDTH


def test_a_draft_of_the_same_tokenizer_and_another_width_drafts_for_it(folder: Path, tmp_path: Path) -> None:
    wider = written(tmp_path, WIDTH + 2)
    for target, draft in ((folder, wider), (wider, folder)):
        config = DraftConfig(drafters=(f"model:{draft}",), target_model=str(target), engine=THREAD)
        assert build_catalogue(config).fingerprint.vocab_size == load_tokenizer(str(target)).vocab_size


def ends(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> frozenset[int]:
    """The end ids of a folder whose files say this."""
    file = folder / "config.json"
    plain = {name: value for name, value in json.loads(file.read_text()).items() if not name.endswith("_token_id")}
    file.write_text(json.dumps(plain | config))
    own = folder / "generation_config.json"
    own.unlink(missing_ok=True)
    if generation is not None:
        own.write_text(json.dumps(generation))
    return load_tokenizer(str(folder)).eos_token_ids


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": [2, 7]}, None, {1, 2, 7}),
        ({"eos_token_id": 7}, {}, {1, 7}),
        ({"text_config": {"eos_token_id": [7, 8]}}, None, {1, 7, 8}),
        ({"eos_token_id": 7}, {"eos_token_id": [5, 6]}, {1, 5, 6}),
        ({"eos_token_id": [7, IMAGE, 10**9, -1]}, None, {1, 7}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {1}),
    ],
)
def test_end_ids_are_the_tokenizers_and_the_files(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: set[int]
) -> None:
    assert ends(written(tmp_path, WIDTH), config, generation) == expected


@pytest.mark.parametrize("value", ["</s>", [True], {"a": 1}])
def test_end_ids_that_are_no_ids_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"generation_config.json: eos_token_id = .*: must be a token id"):
        ends(written(tmp_path, WIDTH), {}, {"eos_token_id": value})
