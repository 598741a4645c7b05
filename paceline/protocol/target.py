"""Messages between coordinator and target."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.errors import require
from paceline.protocol.features import FeatureRequest, Features
from paceline.protocol.proposal import ROOT, Outcome, Proposal
from paceline.protocol.records import StepTimings
from paceline.protocol.sampling import check_top_logprobs
from paceline.protocol.session import Close, Failure, SessionSpec

LIFE_SIGN_MS = 250
"""Time between two signs of life on a link with open sessions. Each names the sessions that the target works for."""
MAX_AT_WORK = 1 << 17
"""Most sessions in one sign of life: a session that waits takes at most 5 of a frame's 1 MiB."""
MAX_LEASE = 64
"""Most target-only rounds that a target may start by itself behind one that was sent."""
MAX_PREFETCHED = 64
"""Most proposals that may be prefetched for one round."""
MAX_PIECE_ROWS = 256
"""Most tokens of a prompt in one piece: a row has at most 21 ids of 5 bytes and values of 4, 200 bytes with its tags,
so a piece takes at most 50 KiB of a frame's 1 MiB, and verdicts find room beside it."""


@dataclass(frozen=True)
class TargetOpen:
    """Opens a session on the target, which computes all but the last prefix token.

    `prompt_logprobs` asks for a report on each token of the prompt: its own log-probability, and that many of the
    most probable tokens in its place; None: no reports. The coordinator has the reports of the first
    `prompt_logprobs_known` tokens behind the first one. `features`: hidden states to send of committed tokens; None:
    none.
    """

    session_id: int
    spec: SessionSpec
    prompt_logprobs: int | None = None
    prompt_logprobs_known: int = 0
    features: FeatureRequest | None = None

    def __post_init__(self) -> None:
        check_top_logprobs("prompt_logprobs", self.prompt_logprobs)
        tokens, most = self.prompt_logprobs_known, self.spec.prompt_length - 1
        limit = f"in [0, {most}], the prompt behind its first token"
        require(0 <= tokens <= most, "prompt_logprobs_known", tokens, limit)


@dataclass(frozen=True)
class Round:
    """A round's command: the rows that the target keeps, the tokens that are new to it, the proposal to verify.

    `base_length` counts KV rows kept (accepted rows of the previous round
    included) and is the round key of rejection and block acceptance. `lease`
    counts the positions behind its first one that the target may draw by rounds
    which it starts by itself: target-only ones. With `drafting` the lease is
    mixed: then rounds with proposals may be among them, and this one may have one.
    `drafting`: whether a draft works for the session meanwhile. It holds for the
    rounds that the target starts by itself, too, until one that is sent says otherwise.
    """

    session_id: int
    base_length: int
    accepted_node: int
    committed: tuple[int, ...]
    proposal: Proposal | None = None
    traceparent: str = ""
    lease: int = 0
    drafting: bool = False

    def __post_init__(self) -> None:
        require(len(self.committed) >= 1, "round committed tokens", len(self.committed), "at least 1")
        require(self.base_length >= 0, "base_length", self.base_length, "at least 0")
        require(self.accepted_node >= ROOT, "accepted_node", self.accepted_node, "at least -1")
        require(0 <= self.lease <= MAX_LEASE, "lease", self.lease, f"in [0, {MAX_LEASE}]")
        alone = self.proposal is None or not self.lease or self.drafting
        require(alone, "lease", self.lease, "0 with a proposal, unless a draft works")

    @property
    def has_mixed_lease(self) -> bool:
        """Whether rounds with proposals may be among those that the target starts by itself."""
        return self.drafting and self.lease > 0

    @property
    def first_position(self) -> int:
        """Absolute position of the token that the root draws."""
        return self.base_length + len(self.committed)

    def following(self, token_id: int, traceparent: str = "") -> Round:
        """The target-only round behind this one, which is target-only and drew the token `token_id`.

        It is what a coordinator would send, so its draws are keyed alike whoever starts it.
        """
        return Round(self.session_id, self.first_position, ROOT, (token_id,), traceparent=traceparent)

    def behind(self, outcome: Outcome, proposal: Proposal | None) -> Round:
        """The round that a coordinator would send with this proposal, or with none, if this one ended so.

        Raises:
            InvalidInput: the outcome's node is none of this round's.
        """
        nodes = len(self.proposal) if self.proposal else 0
        require(outcome.node < nodes, "outcome node", outcome.node, f"in [-1, {nodes - 1}]")
        path_length = len(self.proposal.path(outcome.node)) if self.proposal else 0
        base_length = self.first_position + path_length
        committed = (outcome.next_token,)
        return Round(self.session_id, base_length, outcome.node, committed, proposal, self.traceparent)


@dataclass(frozen=True)
class Prefetch:
    """Proposals for outcomes of the round at `base_length`: with them the target may start the next by itself.

    Coupled acceptance only, so a proposal is its tokens and their parents.
    """

    session_id: int
    base_length: int
    proposals: tuple[tuple[Outcome, Proposal], ...]

    def __post_init__(self) -> None:
        proposals = len(self.proposals)
        few = proposals <= MAX_PREFETCHED
        require(few, "prefetched proposals", proposals, f"at most {MAX_PREFETCHED} for one round")
        for outcome, proposal in self.proposals:
            require(outcome.base_length == self.base_length, "outcome", outcome, f"of round {self.base_length}")
            require(len(proposal) >= 1, "prefetched proposal nodes", len(proposal), "at least 1")


@dataclass(frozen=True)
class SelfStarted:
    """A round that the target started by itself, with the first `nodes` nodes prefetched for the outcome, if any."""

    base_length: int
    nodes: int


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of the unprocessed target distribution after one row."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class PromptPiece:
    """Log-probabilities of consecutive tokens of the prompt, from the one at `first_position` on.

    Each row has the token itself, then the most probable ones in its place.
    """

    session_id: int
    first_position: int
    rows: tuple[RowLogprobs, ...]

    def __post_init__(self) -> None:
        require(self.first_position >= 1, "prompt piece first_position", self.first_position, "at least 1")
        rows = len(self.rows)
        require(1 <= rows <= MAX_PIECE_ROWS, "prompt piece rows", rows, f"in [1, {MAX_PIECE_ROWS}]")


@dataclass(frozen=True)
class Verdict:
    """What the target drew for one round.

    coupled: `token_ids[0]` follows the root, `token_ids[i + 1]` follows node i.
    rejection, block: `token_ids[i]` is the recovered token for node i, the last
    is the bonus; `target_probabilities[i]` is p(x_i); block adds
    `residual_masses[i]` = S_i (`exactness` §1c: S_0 … S_{k-1}).
    """

    session_id: int
    base_length: int
    token_ids: tuple[int, ...]
    target_probabilities: tuple[float, ...] = ()
    residual_masses: tuple[float, ...] = ()
    logprobs: tuple[RowLogprobs, ...] = ()
    timings: StepTimings = StepTimings()
    self_started: SelfStarted | None = None


@dataclass(frozen=True)
class TargetOpened:
    """The target has computed the prefix; `reused_tokens` of it were in its prefix cache."""

    session_id: int
    reused_tokens: int = 0
    timings: StepTimings = StepTimings()


@dataclass(frozen=True)
class AtWork:
    """The target is at work for the session, which waits for nothing else. A sign of life has only these."""

    session_id: int


TargetCommand = TargetOpen | Round | Prefetch | Close
TargetEvent = TargetOpened | Verdict | Features | PromptPiece | Failure | AtWork
