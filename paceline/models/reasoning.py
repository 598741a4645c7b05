"""The reasoning of a text: the tokens between two markers, each of which is one token or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from paceline.models.rendering import Turn
from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import InvalidInput, Unsupported

TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
)
"""Tags that models' templates write around reasoning."""
_QUESTION: Turn = {"role": "user", "content": "paceline_probe_question"}
_THOUGHT = "paceline_probe_thought"


@dataclass(frozen=True)
class ReasoningMarks:
    """The marks around a span of reasoning. A text's spans follow from its token ids alone.

    Attributes:
        opening, closing: in UTF-8; every token that has a part of them belongs to the span.
        spelling: a token's bytes as far as they may be part of a marker; empty: no marker goes on across it.
        borders: special tokens, which end turns: what stands before the last one opens nothing.
    """

    opening: bytes
    closing: bytes
    spelling: Callable[[int], bytes]
    borders: frozenset[int] = frozenset()

    def follow(self, token_ids: Sequence[int]) -> SpanFollower:
        """A follower behind a prompt, in a span if the prompt's last turn opens one and leaves it open."""
        start = next((index for index in range(len(token_ids), 0, -1) if token_ids[index - 1] in self.borders), 0)
        follower = SpanFollower(self, is_open=False)
        for token_id in token_ids[start:]:
            follower.see(token_id)
        return follower

    def span_mask(self, token_ids: Sequence[int], *, is_open: bool) -> list[bool]:
        """For each token whether it is part of a span; `is_open`: whether one is open before the first."""
        mask: list[bool] = []
        follower = SpanFollower(self, is_open=is_open)
        for index, token_id in enumerate(token_ids):
            mask.append(follower.is_open)
            since_opening = follower.see(token_id)
            mask[index] |= follower.is_open
            # The opening marker's first tokens could not be known before its last one.
            while since_opening > 0 and index >= 0:
                mask[index] = True
                since_opening -= len(self.spelling(token_ids[index]))
                index -= 1
        return mask


class SpanFollower:
    """Whether a span is open behind the tokens seen so far."""

    def __init__(self, marks: ReasoningMarks, *, is_open: bool) -> None:
        self.is_open = is_open
        self._marks = marks
        self._most = max(len(marks.opening), len(marks.closing)) - 1
        self._tail = b""
        """The bytes that may begin a marker; none of a complete one."""

    def see(self, token_id: int) -> int:
        """Take the next token.

        Returns:
            The bytes from the beginning of the opening marker that it completes to its own end; 0: it completes none.
        """
        marks, since_opening = self._marks, 0
        piece = marks.spelling(token_id)
        self._tail = self._tail + piece if piece else b""
        while (start := self._tail.find(marker := marks.closing if self.is_open else marks.opening)) >= 0:
            if not self.is_open:
                since_opening = since_opening or len(self._tail) - start
            self.is_open = not self.is_open
            self._tail = self._tail[start + len(marker) :]
        self._tail = self._tail[-self._most :]
        return since_opening


def template_tags(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """The known tags that the chat template writes itself, or removes from earlier answers; None: it has none."""
    for opening, closing in TAGS:
        answer: Turn = {"role": "assistant", "content": f"{opening}\n{_THOUGHT}\n{closing}\n\nand more"}
        question_text, chat_text = (
            _text_or_none(tokenizer, turns) for turns in ([_QUESTION], [_QUESTION, answer, _QUESTION])
        )
        opens = question_text is not None and opening in question_text
        if opens or (chat_text is not None and _THOUGHT not in chat_text):
            return opening, closing
    return None


@lru_cache(maxsize=4)
def reasoning_marks(tokenizer: Tokenizer) -> ReasoningMarks | None:
    """The first pair of tags that are tokens, else the pair that the template uses; None: the model has none.

    Where they are tokens nothing else is a marker: their text in other tokens is text. Cached, since it renders the
    template, and training calls it for each text.
    """
    tokens, hidden = tokenizer.added_tokens, frozenset(tokenizer.hidden_tokens)
    token_tags = next((tags for tags in TAGS if tokens.keys() >= {*tags}), None)
    if token_tags is not None:
        markers = {tokens[tag]: tag.encode() for tag in token_tags}
        return _marks(token_tags, lambda token_id: markers.get(token_id, b""), hidden - markers.keys())
    text_tags = template_tags(tokenizer)
    return _marks(text_tags, cache(tokenizer.text_bytes), hidden) if text_tags else None


def _marks(tags: tuple[str, str], spelling: Callable[[int], bytes], borders: frozenset[int]) -> ReasoningMarks:
    return ReasoningMarks(tags[0].encode(), tags[1].encode(), spelling, borders)


def _text_or_none(tokenizer: Tokenizer, turns: Sequence[Turn]) -> str | None:
    try:
        return tokenizer.template_text(turns)
    except (InvalidInput, Unsupported):
        return None
