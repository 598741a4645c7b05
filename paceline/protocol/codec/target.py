"""Messages between coordinator and target."""

from __future__ import annotations

from paceline.protocol.codec.copying import UNREAD, Copier, Most, OneOf, bound, check_bounds, copier
from paceline.protocol.codec.parts import (
    CLOSE,
    FAILURE,
    FEATURES,
    SESSION_ID,
    TRACEPARENT,
    session_of,
    written_parents,
)
from paceline.protocol.errors import require
from paceline.protocol.generation import MAX_INPUT_TOKENS
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT, Outcome, Proposal
from paceline.protocol.target import (
    MAX_PIECE_ROWS,
    MAX_PREFETCHED,
    Prefetch,
    PromptPiece,
    Round,
    SelfStarted,
    TargetCommand,
    TargetEvent,
    TargetOpen,
    TargetOpened,
    Verdict,
)
from paceline.v1 import target_service_pb2 as pb

PROBABILITY_SLACK = 1e-6
"""A sum of float64 probabilities may pass 1 by rounding."""

_ROWS = MAX_PROPOSAL_NODES + 1
"""Most rows of a round: the root's and one for each node."""
bound(
    pb.Verdict,
    "verdict",
    token_ids=_ROWS,
    target_probabilities=MAX_PROPOSAL_NODES,
    residual_masses=MAX_PROPOSAL_NODES,
    logprobs=_ROWS,
)
bound(pb.Round, "round", committed=Most(MAX_INPUT_TOKENS, "round committed tokens"))
bound(pb.TargetOpen, "open", feature_layers=UNREAD)
bound(pb.Prefetch, "prefetch", proposals=Most(MAX_PREFETCHED, "prefetched proposals"))
bound(
    pb.PrefetchedProposal,
    "prefetched proposal",
    token_ids=Most(MAX_PROPOSAL_NODES, "proposal nodes"),
    parents=Most(MAX_PROPOSAL_NODES, "proposal parents"),
)
bound(pb.PromptPiece, "prompt piece", rows=MAX_PIECE_ROWS)


def _encode_prefetch(command: Prefetch) -> pb.Prefetch:
    proposals = [
        pb.PrefetchedProposal(
            node=outcome.node,
            next_token=outcome.next_token,
            token_ids=proposal.token_ids,
            parents=written_parents(proposal.parents),
        )
        for outcome, proposal in command.proposals
    ]
    return pb.Prefetch(session_id=command.session_id, base_length=command.base_length, proposals=proposals)


def _decode_prefetch(message: pb.Prefetch) -> Prefetch:
    check_bounds(message)
    proposals = []
    for each in message.proposals:
        check_bounds(each)
        require(each.node >= ROOT, "prefetched node", each.node, "at least -1")
        certain = (1.0,) * len(each.token_ids)
        proposal = Proposal(0, tuple(each.token_ids), certain, tuple(each.parents))
        proposals.append((Outcome(message.base_length, each.node, each.next_token), proposal))
    return Prefetch(session_of(message.session_id), message.base_length, tuple(proposals))


def _check_verdict(message: pb.Verdict) -> None:
    require(len(message.token_ids) >= 1, "verdict token_ids", len(message.token_ids), "at least 1 token")
    for p in message.target_probabilities:
        require(0 <= p <= 1 + PROBABILITY_SLACK, "target_probability", p, "in [0, 1]")
    for mass in message.residual_masses:
        require(0 <= mass <= 1 + PROBABILITY_SLACK, "residual_mass", mass, "in [0, 1]")


copier(SelfStarted, pb.SelfStarted)
COMMAND: OneOf[TargetCommand, pb.TargetCommand] = OneOf(
    "target command",
    pb.TargetCommand,
    {
        "round": copier(Round, pb.Round, session_id=SESSION_ID, traceparent=TRACEPARENT),
        "open": copier(TargetOpen, pb.TargetOpen, unused_fields=["feature_layers"], session_id=SESSION_ID),
        "prefetch": Copier(Prefetch, _encode_prefetch, _decode_prefetch),
        "close": CLOSE,
    },
)
EVENT: OneOf[TargetEvent, pb.TargetEvent] = OneOf(
    "target event",
    pb.TargetEvent,
    {
        "verdict": copier(Verdict, pb.Verdict, _check_verdict, session_id=SESSION_ID),
        "opened": copier(TargetOpened, pb.TargetOpened, session_id=SESSION_ID),
        "failure": FAILURE,
        "features": FEATURES,
        "prompt_piece": copier(PromptPiece, pb.PromptPiece, session_id=SESSION_ID),
    },
)
