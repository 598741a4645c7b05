"""Special tokens that a reply's format is made of, put back into the text.

A coordinator's text leaves special tokens out: `[TOOL_CALLS]` and its like. The ids tell where they stood, since each
token says how much text was certain with it. Text that may begin a stop string waits, and comes behind a marker then.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.protocol.generation import Tokens


def with_markers(tokens: Tokens, hidden: Mapping[int, str]) -> str:
    """The text of newly committed tokens, hidden ones written by their names."""
    if not hidden or not any(token_id in hidden for token_id in tokens.token_ids):
        return tokens.text
    pieces, at = list[str](), 0
    for token_id, end in zip(tokens.token_ids, tokens.text_ends, strict=False):
        pieces += [tokens.text[at:end], hidden.get(token_id, "")]
        at = end
    return "".join([*pieces, tokens.text[at:]])
