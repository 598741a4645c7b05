"""SmolLM2's tokenizer drafts for Qwen2.5-Coder's: what they have in common, and what one text takes in each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline_lab.bench.prompts
from paceline.engine.vocabulary.engine import ROWS_PER_ROW
from paceline.engine.vocabulary.shared import shared_vocabulary
from paceline.engine.vocabulary.spelling import Contexts, Speller
from paceline.models.resolve import is_pulled
from paceline.models.token_texts import cutter, token_texts
from paceline.models.tokenizer import load_tokenizer

DRAFT, TARGET = "smollm2-135m", "qwen2.5-coder-1.5b"
IN_COMMON = 39_237
CODE = Path(__file__).parents[3] / "paceline" / "engine"

pytestmark = [
    pytest.mark.full,
    pytest.mark.real_model,
    pytest.mark.skipif(not is_pulled(TARGET), reason=f"needs the pulled {TARGET}"),
]


def test_most_of_the_drafts_tokens_are_the_targets_and_texts_are_spelled_alike() -> None:
    own, target = load_tokenizer(DRAFT), load_tokenizer(TARGET)
    target_texts, draft_texts = token_texts(target), token_texts(own)
    shared = shared_vocabulary(target_texts, draft_texts)
    assert shared.size == IN_COMMON
    speller = Speller(target_texts, draft_texts, shared, cutter(own))
    for text in texts():
        path, contexts = target.encode(text), Contexts()
        spelled = speller.begin(contexts)
        for token in path:
            spelled = speller.follow(spelled, token, contexts)
        assert spelled.tip is not None
        whole = own.encode(text)
        assert spelled.tip.length <= ROWS_PER_ROW * len(path)
        assert abs(spelled.tip.length - len(whole)) <= 0.002 * len(whole), "but for few seams within runs of spaces"


def texts() -> list[str]:
    (folder,) = paceline_lab.bench.prompts.__path__
    kinds = [file.read_text() for file in sorted(Path(folder).glob("*.jsonl"))]
    prompts = ["\n".join(str(json.loads(line)) for line in kind.splitlines())[:20_000] for kind in kinds]
    return [*prompts, *(file.read_text() for file in sorted(CODE.glob("*.py"))[:12])]
