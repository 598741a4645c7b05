"""Logits over the target's vocabulary are what the draft says after its own tokenisation of the text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draft_service.drafters.tree import DraftTree, Node
from paceline.engine.interface import Logits, StepItem, StepPlan
from paceline.engine.table.engine import TableEngine, TableModel
from paceline.engine.vocabulary.engine import TranslatedEngine
from paceline.engine.vocabulary.shared import SharedVocabulary, shared_vocabulary
from paceline.engine.vocabulary.spelling import Contexts, Speller, Spelling
from paceline.models.table_names import TableSpec
from paceline.models.token_texts import TokenTexts, cutter, token_texts
from paceline.protocol.errors import InvalidInput, Overloaded
from paceline.runtime.config import EngineSettings
from tests.engine.tiny import chain, step
from tests.engine.vocabulary import tokenizers_of_two

TARGET = tokenizers_of_two.target_tokenizer()
DRAFTS = {
    "byte-level": tokenizers_of_two.draft_tokenizer(),
    "sentencepiece": tokenizers_of_two.sentencepiece_tokenizer(),
}
SETTINGS = EngineSettings(max_num_seqs=4)
SESSION = 5
SHORT = 40
"""Bytes after which a random text is ended by a special token, before any of it is closed."""


class Direct:
    """The draft's tokenisation of a whole text, and its logits after it, over the target's vocabulary."""

    def __init__(self, name: str = "byte-level", **changes: int) -> None:
        self.tokenizer = draft = DRAFTS[name]
        self.target, self.draft = token_texts(TARGET), token_texts(draft)
        self.shared = shared_vocabulary(self.target, self.draft)
        self.spec = replace(TableSpec(vocab=self.draft.vocab_size, contexts=4099, max_length=400), **changes)
        self._said = TableModel(self.spec).logits
        self._cut = cutter(draft)
        self._named = {name: i for i, name in self.draft.special.items()}
        self._bytes = {text: i for i, text in self.draft.texts.items() if len(text) == 1}

    def context(self, path: Sequence[int]) -> tuple[int, ...]:
        ids, text = [*self.draft.beginning], b""
        for token in path:
            if token in self.target.texts:
                text += self.target.texts[token]
                continue
            ids, text = ids + self._spelled(text), b""
            ids += [self._named[name] for name in [self.target.special[token]] if name in self._named]
        return (*ids, *self._spelled(text))

    def logits(self, path: Sequence[int]) -> Logits:
        row, context = np.full(self.target.vocab_size, -np.inf, np.float32), self.context(path)
        said = self._said(context) if context else np.zeros(self.spec.vocab, np.float32)
        for target_id, draft_id in zip(self.shared.target_ids, self.shared.draft_ids, strict=True):
            row[target_id] = said[draft_id]
        return row

    def _spelled(self, text: bytes) -> list[int]:
        ids: list[int] = []
        for run in re.findall("[\udc80-\udcff]|[^\udc80-\udcff]+", text.decode("utf-8", "surrogateescape")):
            stray = run.encode("utf-8", "surrogateescape") if run > "\udc7f" else b""
            ids += [self._bytes[stray]] if stray else [piece.token_id for piece in self._cut(run)]
        return ids


def engine_of(
    direct: Direct, spelling: type[Speller] = Speller, shared: SharedVocabulary | None = None
) -> TranslatedEngine:
    shared = direct.shared if shared is None else shared
    speller = spelling(direct.target, direct.draft, shared, cutter(direct.tokenizer))
    inner = TableEngine(direct.spec, SETTINGS)
    return TranslatedEngine(inner, speller, shared, TARGET.fingerprint, SETTINGS)


def opened(direct: Direct) -> TranslatedEngine:
    engine = engine_of(direct)
    engine.open(SESSION, 30)
    return engine


class Walk:
    """A session's tree at random: a prompt in chunks, drafts, branches, commits of what was drafted and what wasn't.

    Every row's logits are compared with the direct computation.
    """

    def __init__(self, direct: Direct, engine: TranslatedEngine, seed: int) -> None:
        self._direct, self._engine, self._random = direct, engine, random.Random(seed)
        self._tree = DraftTree(SESSION, self._tokens([], 9), 300)
        self._nodes: list[Node] = []
        self.compared = 0
        engine.open(SESSION, 300)

    def run(self) -> None:
        for _ in range(40):
            while self._tree.lag > 3:
                self._step(2, [])
            self._step(self._tree.lag, [])
            for _ in range(self._random.randint(0, 3)):
                self._step(0, self._drafted())
            if self._random.random() < 0.2:
                self._tree.forget()  # its logits are asked for again
            else:
                self._commit()
        self._engine.close(SESSION)
        assert self._engine.kv_rows == 0

    def _step(self, lag: int, nodes: list[Node]) -> None:
        if not lag and not nodes:
            return
        reaches_root = 0 < lag == self._tree.lag
        (logits,) = self._engine.step(StepPlan((self._tree.item(lag, nodes),)))
        for node, row in zip([*[self._tree.root] * reaches_root, *nodes], logits, strict=True):
            path = [*self._tree.committed, *self._tree.path(node)]
            np.testing.assert_array_equal(row, self._direct.logits(path))
            self.compared += 1

    def _drafted(self) -> list[Node]:
        """Two to five new nodes below nodes whose rows are there, the tokens of some words among them."""
        ready = [node for node in self._tree.root.subtree() if node.row is not None]
        chosen: list[Node] = []
        for _ in range(self._random.randint(2, 5)):
            above = self._random.choice(ready + chosen)
            made = above.child(self._tokens([*self._tree.committed, *self._tree.path(above)], 1)[-1])
            if made.row is None and made not in chosen:
                chosen.append(made)
        return chosen

    def _commit(self) -> None:
        tokens: list[int] = []
        node = self._tree.root
        while node.children and self._random.random() < 0.8:
            node = self._random.choice([*node.children.values()])
            tokens.append(node.token)
        history = [*self._tree.committed, *tokens]
        self._tree.commit([*tokens, *self._tokens(history, self._random.randint(1, 4))])

    def _tokens(self, history: Sequence[int], count: int) -> list[int]:
        """Tokens that may follow: any of the vocabulary, most of them short of a long text."""
        texts, special = self._direct.target.texts, self._direct.target.special
        merged = [i for i, text in texts.items() if len(text) > 1]
        open_bytes = 0
        for token in history:
            open_bytes = 0 if token in special else open_bytes + len(texts[token])
        tokens: list[int] = []
        for _ in range(count):
            pool = [*special] if open_bytes > SHORT else self._random.choice([merged, merged, [*texts], [*special]])
            tokens.append(self._random.choice(pool))
            open_bytes = 0 if tokens[-1] in special else open_bytes + len(texts[tokens[-1]])
        return tokens


def walk(direct: Direct, engine: TranslatedEngine, seed: int = 2) -> int:
    walked = Walk(direct, engine, seed)
    walked.run()
    return walked.compared


@pytest.mark.parametrize("name", DRAFTS)
def test_rows_are_the_drafts_own_after_its_own_tokens(name: str) -> None:
    direct = Direct(name)
    assert walk(direct, engine_of(direct)) > 200


class NeverAgain(Speller):
    """Wrong: every target token is spelled by itself, and what it was spelled as stays."""

    def follow(self, spelled: Spelling, token: int, contexts: Contexts) -> Spelling:
        tip = super().follow(spelled, token, contexts).tip
        return Spelling(tip, tip)


@pytest.mark.parametrize(
    ("spelling", "draft_ids"),
    [
        (NeverAgain, lambda shared: shared.draft_ids),
        (Speller, lambda shared: np.roll(shared.draft_ids, 1)),
        (Speller, lambda shared: shared.target_ids),
    ],
    ids=["never spelled again", "maps off by one", "not mapped"],
)
def test_mutants_are_given_away(spelling: type[Speller], draft_ids: Callable[[SharedVocabulary], Any]) -> None:
    direct = Direct()
    mutant = replace(direct.shared, draft_ids=draft_ids(direct.shared))
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(8):  # trained tokenizers differ from run to run, and so does where walks lead
            walk(direct, engine_of(direct, spelling, mutant), seed)


def ids_of(*texts: str | bytes) -> list[int]:
    ids = {text: i for i, text in token_texts(TARGET).texts.items()}
    return [ids[text.encode() if isinstance(text, str) else text] for text in texts]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_long_text_is_spelled_as_if_it_were_tokenised_whole(name: str) -> None:
    """Closing its beginning loses nothing where words are set apart."""
    direct = Direct(name)
    speller = Speller(direct.target, direct.draft, direct.shared, cutter(direct.tokenizer))
    text = " ".join(random.Random(3).choices(["the", "quick", "jumps\n", "fox(dog)", "é", "漢字", "  over"], k=200))
    path, contexts = TARGET.encode(text), Contexts()
    spelled = speller.begin(contexts)
    for place, token in enumerate(path):
        spelled = speller.follow(spelled, token, contexts)
        assert len(spelled.open_text) <= 80
        if place % 50 == 0 or place == len(path) - 1:
            assert spelled_tokens(spelled) == direct.context(path[: place + 1])


def spelled_tokens(spelled: Spelling) -> tuple[int, ...]:
    tokens: list[int] = []
    node = spelled.tip
    while node is not None:
        tokens.append(node.token)
        node = node.parent
    return tuple(tokens[::-1])


def test_a_text_without_words_is_closed_all_the_same() -> None:
    direct = Direct()
    speller, contexts = Speller(direct.target, direct.draft, direct.shared, cutter(direct.tokenizer)), Contexts()
    spelled = speller.begin(contexts)
    for token in [*ids_of("漢") * 200, *ids_of(b"\xbf") * 600]:
        spelled = speller.follow(spelled, token, contexts)
        assert len(spelled.open_text) <= 256
    assert len(spelled_tokens(spelled)) > 600
    del spelled  # a context of any length is freed without a deep recursion
    assert not [*contexts._nodes]


def test_a_row_without_room_or_context_says_nothing() -> None:
    direct = Direct(max_length=8)
    engine = opened(direct)
    (only_the_targets,) = [i for i, name in direct.target.special.items() if name == "<only the target's>"]
    nothing = np.full(direct.target.vocab_size, -np.inf, np.float32)
    nothing[direct.shared.target_ids] = 0
    np.testing.assert_array_equal(step(engine, chain(SESSION, 0, (only_the_targets,))), [nothing])
    path = [only_the_targets, *ids_of("漢", "漢", "漢")]
    np.testing.assert_array_equal(step(engine, chain(SESSION, 1, path[1:2])), [direct.logits(path[:2])])
    assert len(direct.context(path)) > 8
    np.testing.assert_array_equal(step(engine, chain(SESSION, 2, path[2:])), [direct.logits(path[:3]), nothing])


def test_a_refused_step_or_open_changes_nothing() -> None:
    direct = Direct()
    engine, path = opened(direct), ids_of("f", "o")
    step(engine, StepItem(SESSION, 0, tuple(path)))
    with pytest.raises(InvalidInput, match="token id"):
        step(engine, chain(SESSION, 2, (direct.target.vocab_size,)))
    with pytest.raises(InvalidInput, match="not open"):
        engine.open(SESSION, 20)
    rows = engine.kv_rows
    for session in range(10, 13):
        engine.open(session, 1)
    with pytest.raises(Overloaded):
        engine.open(13, 1)
    for session in range(10, 13):
        engine.close(session)
    assert engine.kv_rows == rows
    more = ids_of("x")
    np.testing.assert_array_equal(step(engine, chain(SESSION, 2, more)), [direct.logits([*path, *more])])


def test_what_vocabularies_share_is_matched_by_bytes_and_names() -> None:
    target = TokenTexts(6, {0: b"a", 1: b" b", 2: b"c", 4: b"a"}, {3: "<end>", 5: "a"})
    draft = TokenTexts(9, {8: b"a", 7: b"b", 2: b" b", 5: b"a"}, {1: "<end>"})
    shared = shared_vocabulary(target, draft)
    assert [*zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True)] == [(0, 5), (1, 2), (3, 1)]
    assert (shared.size, shared.special) == (3, 1)
    wide = shared.scatter(np.arange(9, dtype=np.float32)[np.newaxis])
    np.testing.assert_array_equal(wide, [[5, 2, -np.inf, 1, -np.inf, -np.inf]])
