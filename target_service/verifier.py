"""Verification of one round: logits in, verdict out. Pure.

All draws of the target happen here, before acceptance is decided
(`paceline.sampling.acceptance` has the rules and their papers).
"""

from __future__ import annotations

import math
from dataclasses import astuple

from paceline.engine.interface import NO_FILTERS, Draw, Drawing, DrawnTokens, Filters, Logits
from paceline.protocol.errors import InvalidInput
from paceline.protocol.proposal import ROOT, Acceptance
from paceline.protocol.sampling import SamplingParams
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import Round, RowLogprobs, Verdict
from paceline.sampling import acceptance
from paceline.sampling.distribution import (
    LEAST_SHARED_TEMPERATURE,
    divided_scores,
    greedy_tokens,
    processed_scores,
    row_logprobs,
)
from paceline.sampling.processors import Processors
from paceline.sampling.tree import children


def verify(logits: Logits, facts: SessionSpec, round_: Round, processors: Processors | None = None) -> Verdict:
    """Draw the verdict of one round; timings are left to the caller.

    Args:
        logits: [n + 1, V], the root's row and one for each proposed node.
        facts: how the session samples.
        round_: a checked round.
        processors: of the session, at the round's root; None: its chain is plain.

    Raises:
        InvalidInput: the logits hold NaN, or no token is left to come.
    """
    new_logits = logits if processors is None else _process(logits, round_, processors)
    if facts.acceptance is Acceptance.COUPLED:
        draws = DrawnTokens(_draw_coupled(new_logits, facts, round_))
    elif facts.acceptance is Acceptance.REJECTION:
        p, tokens = acceptance.draw_rejection(processed_scores(new_logits, facts.sampling), round_, facts.noise)
        draws = DrawnTokens(tokens, p)
    else:
        p, masses, tokens = acceptance.draw_block(processed_scores(new_logits, facts.sampling), round_, facts.noise)
        draws = DrawnTokens(tokens, p, masses)
    return _verdict(draws, round_, _logprobs(logits, facts, round_, draws.token_ids))


def _draw_coupled(logits: Logits, facts: SessionSpec, round_: Round) -> tuple[int, ...]:
    if facts.sampling.greedy:
        return greedy_tokens(logits)
    scores, divisor = divided_scores(logits, facts.sampling)
    return acceptance.draw_coupled(scores, acceptance.draw_positions(round_), facts.noise, divisor)


def _process(logits: Logits, round_: Round, processors: Processors) -> Logits:
    new_logits = processors.process(logits, drafted_paths(round_))
    for row in (new_logits.max(axis=1) == -math.inf).nonzero()[0].tolist():
        position = acceptance.draw_positions(round_)[row]
        raise InvalidInput.of(
            f"tokens left at position {position}", 0, "at least 1: bad_words, min_tokens and grammar forbid every one"
        )
    return new_logits


def drafted_paths(round_: Round) -> list[list[int]]:
    """For each row of a round the drafted tokens on the path to it: none for the root's, then those to each node."""
    proposal = round_.proposal or acceptance.EMPTY
    nodes = [proposal.path(node) for node in range(ROOT, len(proposal))]
    return [[proposal.token_ids[i] for i in path] for path in nodes]


def draw_of(facts: SessionSpec, round_: Round, vocab_size: int) -> Draw | None:
    """How an engine may draw the round where its logits are; None: whole rows are needed here.

    With temperature alone every id's score depends on its own logit, and a coupled draw needs little more of filters:
    what stands before a few ids. Anything else (penalties, log-probabilities) needs whole rows here.
    """
    sampling, is_coupled = facts.sampling, facts.acceptance is Acceptance.COUPLED
    temperature, filters = sampling.temperature, Filters(sampling.top_k, sampling.top_p, sampling.min_p)
    if sampling != SamplingParams(temperature, *astuple(filters)):
        return None
    greedy_chain = temperature == 0 and is_coupled
    if not greedy_chain and temperature < LEAST_SHARED_TEMPERATURE:
        return None
    if filters != NO_FILTERS and not is_coupled:
        return None
    own = NO_FILTERS if greedy_chain else filters
    return Draw(facts.acceptance, temperature, facts.noise, round_, vocab_size, own)


def drawn_verdict(drawing: Drawing, round_: Round) -> Verdict:
    """The verdict of a round that the engine has drawn.

    Raises:
        InvalidInput: the logits hold NaN.
    """
    return _verdict(drawing.drawn_tokens(), round_)


def _verdict(draws: DrawnTokens, round_: Round, logprobs: tuple[RowLogprobs, ...] = ()) -> Verdict:
    p, masses = draws.target_probabilities, draws.residual_masses
    return Verdict(round_.session_id, round_.base_length, draws.token_ids, p, masses, logprobs)


def _logprobs(
    logits: Logits, facts: SessionSpec, round_: Round, token_ids: tuple[int, ...]
) -> tuple[RowLogprobs, ...]:
    """One entry for each row: the proposed children and the drawn token, one of which is emitted, then the top n."""
    top = facts.sampling.logprobs
    if top is None:
        return ()
    proposal = round_.proposal
    rows = []
    for row, token in enumerate(token_ids):
        child_nodes = children(proposal.parents, row - 1) if proposal else ()
        proposed = [proposal.token_ids[child] for child in child_nodes] if proposal else []
        rows.append(row_logprobs(logits[row], [*proposed, token], top))
    return tuple(rows)
