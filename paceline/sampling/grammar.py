"""Grammars: JSON schemas, regular expressions and Lark grammars, followed token by token by llguidance.

The library is optional (`paceline[grammar]`). Users write the grammars, and the library bounds neither its time nor
its memory: services use it in processes that can be ended (`paceline.grammars`). Nothing here
imports numpy or torch, so that those processes stay small.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.models.tokenizer import TableTokenizer, Tokenizer, TransformersTokenizer
from paceline.protocol.errors import InvalidInput, Unsupported
from paceline.protocol.sampling import Grammar, GrammarKind
from paceline.sampling.json_schema import library_lark, library_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILING_STACK_BYTES = 256 << 20
"""Address space, not memory. The library descends from rule to rule: a chain of 3000 overflows the usual 8 MiB."""


@dataclass(frozen=True)
class Vocabulary:
    """The facts of a tokenizer that the library needs, as plain data that can go to another process.

    Attributes:
        size: ids are [0, size); a model may have logits for fewer, and readers cut masks to that.
        ends: ids that end a text, ascending.
        fast: a fast tokenizer of Hugging Face as JSON; empty: the tokenizer of a table model.
    """

    size: int
    ends: tuple[int, ...]
    fast: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """A tokenizer's vocabulary.

        Raises:
            Unsupported: the library can't read the tokenizer, or no token ends a text.
        """
        ends = tuple(sorted(tokenizer.eos_token_ids))
        if not ends:
            raise Unsupported("grammar: the model has no token that ends a text")
        if isinstance(tokenizer, TableTokenizer):
            return cls(tokenizer.vocab_size, ends)
        if not isinstance(tokenizer, TransformersTokenizer):
            raise Unsupported(f"grammar: tokens of a {type(tokenizer).__name__} can't be read")
        from transformers import PreTrainedTokenizerFast

        if not isinstance(tokenizer.inner, PreTrainedTokenizerFast):
            raise Unsupported(f"grammar: tokens of a {type(tokenizer.inner).__name__} can't be read")
        return cls(tokenizer.known_size, ends, _fast_tokenizer(tokenizer.inner))

    def check_ends(self, end_token_ids: Sequence[int]) -> None:
        """Refuse ends that aren't the tokenizer's own.

        Raises:
            InvalidInput: naming both.
        """
        ends = tuple(sorted(end_token_ids))
        if ends != self.ends:
            raise InvalidInput.of("end_token_ids", ends, f"{self.ends}, the tokenizer's own, with a grammar")


class TokenTable:
    """The bytes of every token in the library's form; slow to make.

    Raises:
        Unsupported: the library is not installed, or can't read the tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise Unsupported("grammar: needs llguidance, which is not installed (paceline[grammar])") from error
        self.vocabulary = vocabulary
        ends = list(vocabulary.ends)
        if not vocabulary.fast:
            wrapper = TokenizerWrapper(_TableVocabulary(TableTokenizer(vocabulary.size, ends[0]), ends[0]))
            self._tokens = LLTokenizer(wrapper, eos_token=ends)
            return
        try:
            self._tokens = LLTokenizer(vocabulary.fast, n_vocab=vocabulary.size, eos_token=ends)
        except ValueError as error:
            raise Unsupported(f"grammar: the model's tokenizer can't be read ({error})") from error

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the grammar's start.

        Raises:
            InvalidInput: the library refuses the grammar.
        """
        return GrammarMatcher(_compile(grammar, self._tokens), grammar, self.vocabulary.ends)


class GrammarMatcher:
    """A state of a grammar: after some tokens."""

    def __init__(self, inner: LLMatcher, grammar: Grammar, ends: Sequence[int]) -> None:
        self.grammar = grammar
        self._inner = inner
        self._ends = frozenset(ends)

    def copy(self) -> GrammarMatcher:
        """Another matcher in the same state; the two share the library's cache of the language."""
        return GrammarMatcher(self._inner.deep_copy(), self.grammar, tuple(self._ends))

    def next_token_mask(self) -> bytes:
        """The tokens that may come next, one bit each from the lowest on; end tokens where the text may end.

        Raises:
            InvalidInput: the grammar is too complex to follow.
        """
        mask = self._inner.compute_bitmask()
        self._check()
        return mask

    def push(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, if the grammar forbids it or it ends the text."""
        # No text follows an end token; the library can't roll its own state there back.
        if token_id in self._ends:
            return False
        count = self._inner.try_consume_tokens([token_id])
        self._check()
        return count == 1

    def pop(self, count: int) -> None:
        """Roll the last `count` tokens back."""
        self._inner.rollback(count)
        self._check()

    def _check(self) -> None:
        if self._inner.is_error():
            raise grammar_refusal(self.grammar, self._inner.get_error())


class Walk:
    """A matcher that rests at the committed output, and walks along drafted paths in between."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self._path: list[int] = []

    def commit(self, token_ids: Sequence[int]) -> int:
        """Append committed tokens; returns how many precede the first one that the grammar forbids."""
        assert not self._path, "it rests at the committed output"
        for place, token in enumerate(token_ids):
            if not self._matcher.push(token):
                return place
        return len(token_ids)

    def masks(self, paths: Sequence[Sequence[int]]) -> list[bytes | None]:
        """The tokens that may follow each path, as `next_token_mask` has them; None: a token of it is forbidden.

        Raises:
            InvalidInput: the grammar is too complex to follow.
        """
        try:
            return [self._matcher.next_token_mask() if self._go(path) else None for path in paths]
        finally:
            self._go(())

    def _go(self, path: Sequence[int]) -> bool:
        """Move to the end of a path; False if the grammar forbids a token of it."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        if common < len(self._path):
            self._matcher.pop(len(self._path) - common)
            del self._path[common:]
        for token in path[common:]:
            if not self._matcher.push(token):
                return False
            self._path.append(token)
        return True


def grammar_refusal(grammar: Grammar, why: str) -> InvalidInput:
    """The error for a grammar that the library refuses."""
    return InvalidInput.of(
        grammar.kind.value, grammar.text, f"a grammar that can be followed ({' '.join(why.split())})"
    )


def token_refusal(grammar: Grammar, token_id: int, position: int) -> InvalidInput:
    """The error for a committed token that the grammar forbids."""
    return InvalidInput.of(
        f"token at position {position}", token_id, f"a token that the {grammar.kind.value} allows there"
    )


def _compile(grammar: Grammar, tokens: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    notations: dict[GrammarKind, Callable[[str], str]] = {
        GrammarKind.JSON_SCHEMA: lambda text: LLMatcher.grammar_from_json_schema(library_schema(text, _goes_on)),
        GrammarKind.REGEX: LLMatcher.grammar_from_regex,
        GrammarKind.LARK: lambda text: LLMatcher.grammar_from_lark(library_lark(text, _goes_on)),
    }
    try:
        source = notations[grammar.kind](grammar.text)
    except ValueError as error:
        raise grammar_refusal(grammar, str(error)) from error
    matcher = _matcher(tokens, source)
    if matcher.is_error():
        raise grammar_refusal(grammar, matcher.get_error())
    return matcher


def _matcher(tokens: LLTokenizer, source: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    return _on_a_deep_stack(lambda: LLMatcher(tokens, source, log_level=0, limits=limits))


def _goes_on(schema: dict[str, Any]) -> bool:
    """Whether any text may follow the one that a schema forces; as `json_schema.GoesOn`."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    # Letter by letter, so that the whole forced text is known.
    letters = LLTokenizer(TokenizerWrapper(_TableVocabulary(TableTokenizer(257, 256), 256)), eos_token=256)
    matcher = _matcher(letters, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    while not matcher.is_error() and (tokens := matcher.compute_ff_tokens()):
        matcher.consume_tokens(tokens)
    if not matcher.is_error():
        return any(matcher.compute_bitmask()) and not matcher.is_error()
    # What the library refuses here, it refuses in the whole schema, too.
    return "NoExtension" not in matcher.get_error()


def _on_a_deep_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    usual = threading.stack_size(COMPILING_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="grammar") as pool:
            future = pool.submit(make)
    finally:
        threading.stack_size(usual)
    return future.result()


def _fast_tokenizer(tokenizer: object) -> str:
    """A fast tokenizer as JSON, without the padding and truncation that its owner may have switched on."""
    from copy import copy

    backend = copy(getattr(tokenizer, "backend_tokenizer"))  # noqa: B009  transformers leaves it untyped
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


class _TableVocabulary:
    """A table model's tokens in the shape that the library's wrapper reads."""

    bos_token_id = None

    def __init__(self, tokenizer: TableTokenizer, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]

    def __call__(self, text: bytes) -> list[int]:
        return list(self._tokenizer.encode(text.decode("utf-8", "replace")))
