"""Messages between coordinator and draft service."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from paceline.protocol.codec.copying import MAX_NAME_BYTES, UNREAD, Most, OneOf, bound, copier
from paceline.protocol.codec.parts import (
    CLOSE,
    FAILURE,
    FEATURES,
    OUTCOME,
    PROPOSAL,
    SESSION_ID,
    TIMINGS,
    TRACEPARENT,
    TREE_WIDTHS,
    session_of,
)
from paceline.protocol.draft import (
    MAX_SHADOW_TOKENS,
    Commit,
    DraftBudget,
    DraftCommand,
    DraftedProposal,
    DraftEvent,
    DraftOpen,
    DraftOpened,
    Shadow,
    Verifying,
)
from paceline.protocol.errors import require
from paceline.protocol.generation import MAX_INPUT_TOKENS
from paceline.protocol.proposal import MAX_DRAFTER_BYTES, MAX_PROPOSAL_NODES, Proposal
from paceline.protocol.records import StepTimings
from paceline.v1 import draft_service_pb2 as pb

MAX_FAN_OUT = 64
MAX_RANK = (1 << 16) - 1
bound(pb.DraftBudget, "budget", tree_widths=Most(MAX_PROPOSAL_NODES, "tree_widths", unit="depths"))
bound(pb.Commit, "commit", token_ids=MAX_INPUT_TOKENS)
bound(pb.DraftOpen, "open", drafter=MAX_DRAFTER_BYTES)
bound(pb.DraftOpened, "opened", drafter=MAX_NAME_BYTES, feature_layers=UNREAD)
bound(pb.Shadow, "shadow", ranks=MAX_SHADOW_TOKENS, probabilities=MAX_SHADOW_TOKENS)


def _check_budget(message: pb.DraftBudget) -> None:
    nodes = f"at most {MAX_PROPOSAL_NODES}"
    require(message.max_tokens <= MAX_PROPOSAL_NODES, "budget max_tokens", message.max_tokens, nodes)
    require(message.max_nodes <= MAX_PROPOSAL_NODES, "budget max_nodes", message.max_nodes, nodes)
    require(message.fan_out <= MAX_FAN_OUT, "budget fan_out", message.fan_out, f"at most {MAX_FAN_OUT}")
    require(0 <= message.least_chance <= 1, "budget least_chance", message.least_chance, "in [0, 1]")


def _check_commit(message: pb.Commit) -> None:
    require(message.HasField("outcome"), "commit outcome", None, "set")
    require(len(message.token_ids) >= 1, "commit token_ids", len(message.token_ids), "at least 1 token")


def _check_verifying(message: pb.Verifying) -> None:
    one_way = not (message.proposal_id and message.HasField("proposal"))
    require(one_way, "verifying proposal_id", message.proposal_id, "0 when the proposal is inline")
    nodes = message.node_count
    require(nodes <= MAX_PROPOSAL_NODES, "verifying node_count", nodes, f"at most {MAX_PROPOSAL_NODES}")


def _check_shadow(message: pb.Shadow) -> None:
    tokens = len(message.ranks)
    require(1 <= tokens <= MAX_SHADOW_TOKENS, "shadow ranks", tokens, f"in [1, {MAX_SHADOW_TOKENS}]")
    same = len(message.probabilities) == tokens
    require(same, "shadow probabilities", len(message.probabilities), f"{tokens}, one for each rank")
    require(message.first_position >= 1, "shadow first_position", message.first_position, "at least 1")
    require(max(message.ranks) <= MAX_RANK, "shadow rank", max(message.ranks), f"at most {MAX_RANK}")
    for q in message.probabilities:
        require(0 <= q <= 1, "shadow probability", q, "in [0, 1]")


class _ReceivedProposal(DraftedProposal):
    """A proposal that is decoded when it is first read: of the many drafted for a round's outcomes, one is read.

    Reading `proposal` or `timings` raises `InvalidInput` if they are malformed.
    """

    def __init__(self, message: pb.DraftedProposal) -> None:
        require(message.HasField("proposal"), "drafted proposal", None, "set (it may be empty)")
        facts = self.__dict__  # the dataclass is frozen
        facts["session_id"] = session_of(message.session_id)
        facts["outcome"] = OUTCOME.decode(message.outcome) if message.HasField("outcome") else None
        facts["_message"] = message

    @cached_property
    def proposal(self) -> Proposal:
        return PROPOSAL.decode(self.__dict__["_message"].proposal)

    @cached_property
    def timings(self) -> StepTimings:
        return TIMINGS.decode(self.__dict__["_message"].timings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftedProposal) and _facts_of(self) == _facts_of(other)

    def __hash__(self) -> int:
        return hash(_facts_of(self))


def _facts_of(drafted: DraftedProposal) -> tuple[object, ...]:
    return drafted.session_id, drafted.outcome, drafted.proposal, drafted.timings


copier(DraftBudget, pb.DraftBudget, _check_budget, tree_widths=TREE_WIDTHS)
DRAFTED = copier(DraftedProposal, pb.DraftedProposal)
COMMAND: OneOf[DraftCommand, pb.DraftCommand] = OneOf(
    "draft command",
    pb.DraftCommand,
    {
        "commit": copier(
            Commit, pb.Commit, _check_commit, ["features"], session_id=SESSION_ID, traceparent=TRACEPARENT
        ),
        "verifying": copier(Verifying, pb.Verifying, _check_verifying, session_id=SESSION_ID),
        "open": copier(DraftOpen, pb.DraftOpen, session_id=SESSION_ID),
        "features": FEATURES,
        "close": CLOSE,
    },
)
EVENT: OneOf[DraftEvent, pb.DraftEvent] = OneOf(
    "draft event",
    pb.DraftEvent,
    {
        "proposal": replace(DRAFTED, decode=_ReceivedProposal),
        "opened": copier(DraftOpened, pb.DraftOpened, unused_fields=["feature_layers"], session_id=SESSION_ID),
        "shadow": copier(Shadow, pb.Shadow, _check_shadow, session_id=SESSION_ID),
        "failure": FAILURE,
    },
)
