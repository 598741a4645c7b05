"""What a reply's tokens tell that its text doesn't: markers, how many are reasoning, and which stop ended it.

Tokens of reasoning are counted by ids: text may be held back behind them. A marker that is no token of its own is
looked for in the text of the latest tokens.

A coordinator's text leaves special tokens out: `[TOOL_CALLS]` and its like. The ids tell where they stood, since each
token says how much text was certain with it. Text that may begin a stop string waits, and comes behind a marker then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.generation import MAX_STOP_CHARACTERS, Tokens
from paceline_gateway.reply.format import ReasoningTags, ReplyFormat

_TAIL_TOKENS = MAX_STOP_CHARACTERS + 8
"""The longest stop string, a token for each character, and what its first token may have in front of it."""


class ReasoningTokens:
    """Counts a reply's tokens of reasoning; `_state` is the method that takes the next token.

    Args:
        tokenizer: the model's.
        form: the format of its replies.
        in_reasoning: whether the template opened the span.
    """

    def __init__(self, tokenizer: Tokenizer, form: ReplyFormat, *, in_reasoning: bool) -> None:
        self.count = 0
        self._tokenizer = tokenizer
        tags = form.reasoning or ReasoningTags("", "")
        self._opening, self._closing = tags.opening, tags.closing
        self._ids = form.tokens
        # A token has at least a byte of the marker, and the first may have text in front of it.
        self._tail = deque[int](maxlen=len(self._closing.encode()) + 1)
        self._state: Callable[[int], None] | None = None
        if form.reasoning is not None:
            self._state = self._count_token if in_reasoning else self._look_for_opening

    def see(self, token_ids: Sequence[int]) -> None:
        """Take newly committed tokens."""
        for token_id in token_ids:
            if self._state is None:
                return
            self._state(token_id)

    def _look_for_opening(self, token_id: int) -> None:
        """Look for the opening marker: reasoning comes first in a reply, or not at all."""
        self._tail.append(token_id)
        text = self._tokenizer.decode(tuple(self._tail)).lstrip()
        if token_id == self._ids.get(self._opening) or text.startswith(self._opening):
            self._tail.clear()
            self._state = self._count_token
        elif text and not self._opening.startswith(text):
            self._state = None

    def _count_token(self, token_id: int) -> None:
        self.count += 1
        self._tail.append(token_id)
        length = self._closing_length()
        if length:
            self.count -= length
            self._state = None

    def _closing_length(self) -> int:
        """Return how many of the last tokens make the closing marker; 0: it isn't there yet."""
        tail = tuple(self._tail)
        if (marker := self._ids.get(self._closing)) is not None:
            return int(tail[-1] == marker)
        ends = (n for n in range(1, len(tail) + 1) if self._closing in self._tokenizer.decode(tail[-n:]))
        return min(next(ends, 0), self.count) if self._closing in self._tokenizer.decode(tail) else 0


class StopWatch:
    """Finds what ended a reply. A stop string is complete with the last token, whose text isn't sent."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._token_ids = frozenset(token_ids)
        self._tail: deque[int] = deque(maxlen=_TAIL_TOKENS)

    def see(self, token_ids: Sequence[int]) -> None:
        """Take newly committed tokens."""
        self._tail.extend(token_ids)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended a reply that stopped; None: the model's own end."""
        if not self._tail:
            return None
        last = self._tail[-1]
        if last in self._token_ids:
            return last
        return None if last in self._tokenizer.eos_token_ids else self._string()

    def _string(self) -> str | None:
        """Return the first stop string that reaches into the last token's text."""
        ids = list(self._tail)
        last_at, text = len(self._tokenizer.decode(ids[:-1])), self._tokenizer.decode(ids)
        places = ((text.find(string, max(0, last_at - len(string) + 1)), string) for string in self._strings)
        return min(((position, string) for position, string in places if position >= 0), default=(0, None))[1]


def with_markers(tokens: Tokens, marker_tokens: Mapping[int, str]) -> str:
    """Return the text of newly committed tokens, marker tokens written out."""
    if not marker_tokens or not any(token_id in marker_tokens for token_id in tokens.token_ids):
        return tokens.text
    pieces, position = list[str](), 0
    for token_id, end in zip(tokens.token_ids, tokens.text_ends, strict=False):
        pieces += [tokens.text[position:end], marker_tokens.get(token_id, "")]
        position = end
    return "".join([*pieces, tokens.text[position:]])
