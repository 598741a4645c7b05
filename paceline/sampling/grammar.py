"""Grammars: JSON schemas, regular expressions and Lark grammars, followed token by token by llguidance.

The library is optional (`paceline[grammar]`). A tokenizer's token table is made once, when its first
grammar comes; compiled grammars are kept, since a re-opened session and the samples of one request
bring the same again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.models.tokenizer import TableTokenizer, Tokenizer, TransformersTokenizer
from paceline.protocol.errors import InvalidInput, Unsupported, require
from paceline.protocol.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT_GRAMMARS = 64
"""Compiled grammars that are kept, the latest used; chosen, not tuned."""
COMPILING_STACK_BYTES = 256 << 20
"""Address space, not memory. The library descends from rule to rule: a chain of 3000 overflows the usual 8 MiB."""


class Grammars:
    """Matchers over one tokenizer; may be called from any thread.

    Args:
        load: the tokenizer; called once, by the first grammar.
    """

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load
        self._table: tuple[LLTokenizer, int] | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar, end_token_ids: Sequence[int]) -> GrammarMatcher:
        """A matcher at the grammar's start. Slow: the first takes seconds, a large grammar one second.

        Raises:
            InvalidInput: the library refuses the grammar; or the ends are not the tokenizer's own.
            Unsupported: the library is not installed, or can't read the tokenizer.
        """
        with self._lock:
            if self._table is None:
                self._table = _token_table(self._load())
            table, vocab_size = self._table
            ends = tuple(sorted(end_token_ids))
            known = tuple(sorted(table.eos_tokens))
            require(ends == known, "end_token_ids", ends, f"{known}, the tokenizer's own, with a grammar")
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = self._compiled[grammar] = _compile(grammar, table)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return GrammarMatcher(compiled.deep_copy(), grammar, vocab_size, ends)


class GrammarMatcher:
    """One session's place in a grammar; `paceline.sampling.processors.Matcher` says what its methods promise."""

    def __init__(self, inner: LLMatcher, grammar: Grammar, vocab_size: int, ends: Sequence[int]) -> None:
        self._inner = inner
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._ends = frozenset(ends)

    def allowed(self) -> NDArray[np.bool_]:  # noqa: D102
        packed = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)

    def push(self, token_id: int) -> bool:  # noqa: D102
        # Behind an end token there is no text; the library's own state there can't be taken back.
        if token_id in self._ends:
            return False
        taken = self._inner.try_consume_tokens([token_id])
        self._check()
        return taken == 1

    def pop(self, count: int) -> None:  # noqa: D102
        self._inner.rollback(count)
        self._check()

    def _check(self) -> None:
        if self._inner.is_error():
            raise _refused(self._grammar, self._inner.get_error())


def _compile(grammar: Grammar, table: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    notations: dict[GrammarKind, Callable[[str], str]] = {
        GrammarKind.JSON_SCHEMA: LLMatcher.grammar_from_json_schema,
        GrammarKind.REGEX: LLMatcher.grammar_from_regex,
        GrammarKind.LARK: LLMatcher.grammar_from_lark,
    }
    limits = LLParserLimits(verbose_errors=False)
    try:
        source = notations[grammar.kind](grammar.text)
    except ValueError as error:
        raise _refused(grammar, str(error)) from error
    compiled = _on_a_deep_stack(lambda: LLMatcher(table, source, log_level=0, limits=limits))
    if compiled.is_error():
        raise _refused(grammar, compiled.get_error())
    return compiled


def _on_a_deep_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    usual = threading.stack_size(COMPILING_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="grammar") as pool:
            made = pool.submit(make)
    finally:
        threading.stack_size(usual)
    return made.result()


def _refused(grammar: Grammar, why: str) -> InvalidInput:
    return InvalidInput.of(
        grammar.kind.value, grammar.text, f"a grammar that can be followed ({' '.join(why.split())})"
    )


def _token_table(tokenizer: Tokenizer) -> tuple[LLTokenizer, int]:
    """The bytes of every token, as the library wants them, and their number."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise Unsupported("grammar: needs llguidance, which is not installed (paceline[grammar])") from error
    ends = sorted(tokenizer.eos_token_ids)
    if not ends:
        raise Unsupported("grammar: the model has no token that ends a text")
    if isinstance(tokenizer, TableTokenizer):
        wrapped = TokenizerWrapper(_TableVocabulary(tokenizer, ends[0]))
        return LLTokenizer(wrapped, eos_token=ends), tokenizer.vocab_size
    if not isinstance(tokenizer, TransformersTokenizer):
        raise Unsupported(f"grammar: tokens of a {type(tokenizer).__name__} can't be read")
    from llguidance.hf import from_tokenizer
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer.inner, PreTrainedTokenizerFast):
        raise Unsupported(f"grammar: tokens of a {type(tokenizer.inner).__name__} can't be read")
    try:
        table = from_tokenizer(tokenizer.inner, n_vocab=tokenizer.vocab_size, eos_token=ends)
    except ValueError as error:
        raise Unsupported(f"grammar: the model's tokenizer can't be read ({error})") from error
    return table, tokenizer.vocab_size


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
