"""Formats of replies by the names of their templates, and what parsers and grammars make of a text."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

import numpy as np

from paceline.models.tokenizer import TableTokenizer, Tokenizer, TransformersTokenizer
from paceline.sampling.grammar import GrammarMatcher, TokenTable, Vocabulary
from paceline_gateway.reply.call_grammar import CallRules, call_grammar
from paceline_gateway.reply.deltas import ReplyDelta, join_deltas
from paceline_gateway.reply.format import ReplyFormat
from paceline_gateway.reply.parser import reply_parser
from paceline_gateway.reply.template_probes import read_reply_format
from tests.gateway import templates
from tests.gateway.templates import templated


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return TableTokenizer(260, 256) if name == "TABLE" else templated(getattr(templates, name))


@cache
def form_of(name: str) -> ReplyFormat:
    return read_reply_format(tokenizer_of(name))


@cache
def table_of(name: str) -> TokenTable:
    return TokenTable(Vocabulary.of(tokenizer_of(name)))


def parsed(name: str, pieces: Iterable[str], functions: Collection[str], **state: bool) -> list[ReplyDelta]:
    """What a reply becomes that comes in these pieces; its calls have the ids id1, id2, …"""
    numbers = itertools.count(1)
    parser = reply_parser(form_of(name), functions, new_id=lambda: f"id{next(numbers)}", **state)
    return join_deltas([*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()])


def compiled(name: str, rules: CallRules, *, in_reasoning: bool = False, **more: Any) -> GrammarMatcher:
    return table_of(name).compile(call_grammar(form_of(name), rules, in_reasoning=in_reasoning, **more))


def ids_of(name: str, text: str) -> tuple[int, ...]:
    tokenizer = tokenizer_of(name)
    if isinstance(tokenizer, TransformersTokenizer):
        return tuple(tokenizer.inner.encode(text, add_special_tokens=False))
    return tokenizer.encode(text)


def allowed(at: GrammarMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(at.next_token_mask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def takes(at: GrammarMatcher, name: str, text: str) -> bool:
    """Whether a text is one of the language's, and may end there."""
    pushed = all(at.push(token) for token in ids_of(name, text))
    return pushed and bool(tokenizer_of(name).eos_token_ids & set(allowed(at)))
