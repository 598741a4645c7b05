"""Checks of a target's answers: token ids are in the served vocabulary, and lengths are those that were asked for.

A target writes the text, so nothing can tell whether it drew honestly. An answer that no honest target could send
ends the request with an error that names the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.protocol.errors import ProtocolMismatch
from paceline.protocol.target import PromptPiece, Verdict


def check_verdict(verdict: Verdict, vocab_size: int, logprobs: int | None) -> None:
    """Check a verdict's token ids against the vocabulary, and its rows of log-probabilities.

    There must be as many rows as were asked for, and each must have the drawn token. The number of tokens and
    probabilities is checked by the acceptance rule, which knows the proposal.

    Args:
        verdict: the target's.
        vocab_size: of the served model.
        logprobs: as `SamplingParams.logprobs`.

    Raises:
        ProtocolMismatch: naming field, value and limit.
    """
    _check_ids("verdict token_ids", verdict.token_ids, vocab_size)
    rows = 0 if logprobs is None else len(verdict.token_ids)
    _expect(len(verdict.logprobs) == rows, "verdict logprobs", len(verdict.logprobs), f"{rows} rows")
    for row, token_id in zip(verdict.logprobs, verdict.token_ids, strict=False):
        _check_ids("verdict logprobs", row.token_ids, vocab_size)
        _expect(len(set(row.token_ids)) == len(row.token_ids), "verdict logprobs", row.token_ids, "each id once")
        _expect(token_id in row.token_ids, "verdict logprobs", row.token_ids, f"with the drawn token, {token_id}")


def check_piece(piece: PromptPiece, prompt: Sequence[int], vocab_size: int, alternatives: int) -> None:
    """Check that rows of a prompt's log-probabilities are of its tokens, and their ids in the vocabulary.

    Args:
        piece: the target's; its positions are the prompt's.
        prompt: its token ids.
        vocab_size: of the served model.
        alternatives: how many of the most probable tokens were asked for.

    Raises:
        ProtocolMismatch: naming field, value and limit.
    """
    for position, row in enumerate(piece.rows, start=piece.first_position):
        ids = row.token_ids
        _check_ids("prompt logprobs", ids, vocab_size)
        _expect(ids[:1] == (prompt[position],), "prompt logprobs", ids, f"of the prompt's token {prompt[position]}")
        _expect(len(ids) <= alternatives + 1, "prompt logprobs ids", len(ids), f"at most {alternatives + 1}")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        _expect(token_id < vocab_size, name, token_id, f"below {vocab_size}, the vocabulary")


def _expect(holds: bool, name: str, value: object, limit: str) -> None:
    if not holds:
        facts = {"field": name, "value": str(value), "limit": limit}
        raise ProtocolMismatch(f"the target sent {name} = {value}: must be {limit}", metadata=facts)
