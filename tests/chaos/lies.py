"""What a lying peer says: a frame's message with other proposals, or with other costs, as its wire has it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError

from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import types_pb2

Lie = Callable[[bytes, random.Random], bytes]
"""Changes a message on its way to the coordinator; one that it can't read stays as it is."""
BEYOND = 1 << 20
"""Added to a token id: no vocabulary has it."""
MANY = 8
"""Lines of costs have at most 64 points; a lie needs a few."""


def _draft_response(change: Callable[[draft_pb.DraftResponse, random.Random], None]) -> Lie:
    def lie(message: bytes, source: random.Random) -> bytes:
        try:
            response = draft_pb.DraftResponse.FromString(message)
        except DecodeError:
            return message
        change(response, source)
        return response.SerializeToString()

    return lie


def _other_tokens(response: draft_pb.DraftResponse, source: random.Random) -> None:
    """Within the vocabulary, as far as the proposals' own tokens show it."""
    proposals = [each.proposal.proposal for each in response.events if each.HasField("proposal")]
    known = sorted({token for proposal in proposals for token in proposal.token_ids})
    for proposal in proposals:
        proposal.token_ids[:] = [source.choice(known) for _ in proposal.token_ids]


def _unknown_tokens(response: draft_pb.DraftResponse, source: random.Random) -> None:
    for each in response.events:
        if each.HasField("proposal"):
            ids = each.proposal.proposal.token_ids
            ids[:] = [token + BEYOND for token in ids]


def _other_outcomes(response: draft_pb.DraftResponse, source: random.Random) -> None:
    for each in response.events:
        if each.HasField("proposal") and each.proposal.HasField("outcome"):
            each.proposal.outcome.base_length += source.randint(1, 9)


def _other_probabilities(response: draft_pb.DraftResponse, source: random.Random) -> None:
    for each in response.events:
        if each.HasField("proposal"):
            chances = each.proposal.proposal.draft_probabilities
            chances[:] = [source.random() for _ in chances]


def _other_ranks(response: draft_pb.DraftResponse, source: random.Random) -> None:
    for each in response.events:
        if each.HasField("shadow"):
            each.shadow.first_position += source.randint(-3, 3) if each.shadow.first_position > MANY else 1


def _draft_costs(response: draft_pb.DraftResponse, source: random.Random) -> None:
    _lie_about(response.costs.line, source)
    response.costs.queue = source.randrange(1 << 20)


def _target_costs(message: bytes, source: random.Random) -> bytes:
    try:
        response = target_pb.VerifyResponse.FromString(message)
    except DecodeError:
        return message
    if response.events:
        _lie_about(response.costs.alone, source)
        _lie_about(response.costs.beside, source)
        response.costs.queue = source.randrange(1 << 20)
    return response.SerializeToString()


def without_verdicts(message: bytes) -> bytes:
    """A target's frame as if its verdicts had got lost within it; signs of life stay as they are."""
    try:
        response = target_pb.VerifyResponse.FromString(message)
    except DecodeError:
        return message
    kept = [each for each in response.events if not each.HasField("verdict")]
    del response.events[:]
    response.events.extend(kept)
    return response.SerializeToString()


def _lie_about(line: types_pb2.CostLine, source: random.Random) -> None:
    """Free, very dear, or no line at all."""
    kind = source.randrange(3)
    ms = [0.0] * MANY if kind == 0 else [1e6 + place for place in range(MANY)]
    line.rows[:] = [float(1 + place) for place in range(MANY)]
    line.ms[:] = ms if kind < 2 else ms[::-1]


DRAFT_LIES: Mapping[str, Lie] = {
    "other tokens": _draft_response(_other_tokens),
    "unknown tokens": _draft_response(_unknown_tokens),
    "other outcomes": _draft_response(_other_outcomes),
    "other probabilities": _draft_response(_other_probabilities),
    "other ranks": _draft_response(_other_ranks),
}
COST_LIES: Mapping[str, Lie] = {"target": _target_costs, "draft": _draft_response(_draft_costs)}
"""By the role of who tells them."""
