"""From a draft's engine and two tokenizers to the draft's engine in the target's vocabulary."""

from __future__ import annotations

import logging

from paceline.engine.interface import Engine
from paceline.engine.vocabulary.engine import TranslatedEngine
from paceline.engine.vocabulary.shared import refuse_strangers, shared_vocabulary
from paceline.engine.vocabulary.spelling import Speller
from paceline.models.token_texts import cutter, token_texts
from paceline.models.tokenizer import Tokenizer
from paceline.runtime.config import EngineSettings

logger = logging.getLogger(__name__)


def translate_engine(
    inner: Engine, own: Tokenizer, target: Tokenizer, settings: EngineSettings, target_name: str
) -> Engine:
    """Make a draft's engine one of the target's vocabulary.

    Args:
        inner: the draft's engine.
        own: its tokenizer.
        target: the target's.
        settings: of the engine; sessions and their rows are counted by them.
        target_name: for messages.

    Raises:
        VocabularyMismatch: the vocabularies have too little in common.
        Unsupported: a vocabulary whose texts are not known in bytes.
    """
    name = inner.info.fingerprint.model
    draft_texts, target_texts = token_texts(own), token_texts(target)
    vocabulary = shared_vocabulary(target_texts, draft_texts)
    refuse_strangers(vocabulary, target_texts, (name, target_name))
    logger.info(
        "drafter %s has another vocabulary: %d tokens in common, of its own %d and %s's %d",
        name,
        vocabulary.size,
        draft_texts.vocab_size,
        target_name,
        target_texts.vocab_size,
    )
    speller = Speller(target_texts, draft_texts, vocabulary, cutter(own))
    return TranslatedEngine(inner, speller, vocabulary, target.fingerprint, settings)
