"""A prompt's log-probabilities: a table for people, a list for programs."""

from __future__ import annotations

from itertools import zip_longest

from rich.table import Table

from paceline.client import Generation
from paceline.protocol.target import RowLogprobs


def prompt_table(generation: Generation) -> Table:
    """A line for each token of the prompt, by its id."""
    table = Table(title="prompt, log-probabilities", title_justify="left")
    for name in ("position", "token", "log-probability"):
        table.add_column(name, justify="right")
    table.add_column("most probable in its place")
    rows = (None, *generation.prompt_logprobs)
    for position, (token, row) in enumerate(zip_longest(generation.prompt_token_ids, rows)):
        own, best = (f"{row.logprobs[0]:.4f}", _best(row)) if row else ("-", "")
        table.add_row(str(position), str(token), own, best)
    return table


def prompt_json(generation: Generation) -> dict[str, object]:
    """One entry for each token of the prompt, null for the first; empty if the request didn't ask for them."""
    if not generation.prompt_logprobs:
        return {}
    entries = [
        {"token_id": token, "logprob": logprob, "top": [{"token_id": i, "logprob": x} for i, x in best]}
        for (token, logprob), *best in (_pairs(row) for row in generation.prompt_logprobs)
    ]
    return {"prompt_logprobs": [None, *entries]}


def _best(row: RowLogprobs) -> str:
    return "  ".join(f"{token} {logprob:.4f}" for token, logprob in _pairs(row)[1:])


def _pairs(row: RowLogprobs) -> list[tuple[int, float]]:
    return [*zip(row.token_ids, row.logprobs, strict=True)]
