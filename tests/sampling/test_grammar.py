"""Grammars: what the library is given, what it refuses, and that it is asked once."""

from __future__ import annotations

import random

import pytest

from paceline.models.tokenizer import TableTokenizer
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.sampling import Grammar, GrammarKind
from paceline.sampling.grammar import GrammarMatcher, TokenTable, Vocabulary
from tests.sampling.random_schemas import BYTES, TABLE, ids_of

LETTERS = TableTokenizer(30, 29)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "price": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["a", "bc"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "price", "kind"],
    "additionalProperties": False,
}
TABLES = {BYTES: TABLE, LETTERS: TokenTable(Vocabulary.of(LETTERS))}


def matcher_of(tokenizer: TableTokenizer, grammar: Grammar) -> GrammarMatcher:
    return TABLES[tokenizer].compile(grammar)


def allowed(matcher: GrammarMatcher) -> list[int]:
    return ids_of(matcher.next_token_mask())


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def test_pushes_that_are_taken_back_leave_no_trace() -> None:
    rng = random.Random(2)
    grammar = regex("(ab|c[d-f]+|gh{2,4})*")
    used = matcher_of(LETTERS, grammar)
    kept: list[int] = []
    for _ in range(60):
        depth = 0
        for _ in range(rng.randrange(5)):
            depth += used.push(rng.choice(allowed(used)))
        used.pop(depth)
        token = rng.choice([i for i in allowed(used) if i != 29])
        assert used.push(token)
        kept.append(token)
        fresh = matcher_of(LETTERS, grammar)
        assert all(fresh.push(each) for each in kept)
        assert used.next_token_mask() == fresh.next_token_mask()


def test_a_forbidden_token_and_an_end_change_nothing() -> None:
    matcher = matcher_of(LETTERS, regex("ab?"))
    assert not matcher.push(1)
    assert matcher.push(0)
    assert not matcher.push(29)
    assert allowed(matcher) == [1, 29]


@pytest.mark.parametrize(
    ("kind", "text", "names"),
    [
        (GrammarKind.REGEX, "(a", "regex = '(a': must be a grammar that can be followed"),
        (GrammarKind.LARK, "start: foo", "unknown name"),
        (GrammarKind.JSON_SCHEMA, '{"type": "nope"}', "json_schema = "),
        (GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
    ],
)
def test_bad_grammars_are_refused_by_field(kind: GrammarKind, text: str, names: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        matcher_of(BYTES, Grammar(kind, text))
    assert names in caught.value.message
    assert caught.value.metadata["field"] == kind.value


def test_ends_must_be_the_tokenizers_own() -> None:
    with pytest.raises(InvalidInput, match="end_token_ids"):
        Vocabulary.of(LETTERS).check_ends((28,))
    with pytest.raises(Unsupported, match="no token that ends a text"):
        Vocabulary.of(TableTokenizer(30, None))


def test_a_long_chain_of_rules_does_not_end_the_process() -> None:
    rules = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(3500))
    lark = f'start: r0\n{rules}r3500: "b"'
    matcher = matcher_of(BYTES, Grammar(GrammarKind.LARK, lark))
    assert all(matcher.push(ord("a")) for _ in range(50))
    assert allowed(matcher) == [ord("a")]
