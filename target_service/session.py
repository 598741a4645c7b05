"""One session on the target: its state, its pending round, and those that it starts by itself. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.engine.blocks import BlockKey, prefix_keys
from paceline.engine.interface import NO_PREFIX, EngineInfo, Prefix, StepItem
from paceline.grammars.sessions import GrammarSession, PrecomputedFollower
from paceline.protocol.errors import require
from paceline.protocol.features import FeatureRequest
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT, Acceptance, Outcome
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import MAX_PREFETCHED, Prefetch, Round, SelfStarted, Verdict
from paceline.rpc.sessions import ServedSession
from paceline.runtime.config import EngineSettings
from paceline.sampling import acceptance
from paceline.sampling.processors import Follower, Processors
from target_service.checks import check_round, require_same
from target_service.prompt_rows import NO_ROWS, ReportedRows


@dataclass(frozen=True)
class PendingRound:
    """A round that waits for a step; `arrived_at` on the monotonic clock, seconds."""

    round_: Round
    arrived_at: float


@dataclass(frozen=True)
class AnsweredRound:
    """A round and its verdict."""

    round_: Round
    verdict: Verdict


@dataclass(frozen=True)
class Lease:
    """How far a session may go on without its coordinator.

    Attributes:
        last_position: that it may draw so.
        traceparent: the parent of those rounds' spans.
        is_mixed: whether rounds with proposals may be among them; each is named then, since nobody can count them.
    """

    last_position: int = 0
    traceparent: str = ""
    is_mixed: bool = False


@dataclass(eq=False)
class Session(ServedSession):
    """A session's state; changed under the scheduler's lock.

    Attributes:
        max_rows: KV rows that are reserved for it; `key` is its number in the engine.
        prefilled_rows: the number of prefix tokens whose rows are in KV. The first `reused_rows` of them came from
            other sessions. After the first round KV has the rows of `last.round_`, too.
        keys, awaits, released_blocks: for `PendingPrefixes`: the blocks of the prefix, the block that the session
            waits for, and how many of its first blocks it no longer claims.
        is_admitted: whether its rows are reserved.
        forward_ms: of all steps that computed the prefix; `first_step` is when the first of them began.
        pending: the round that waits for a step.
        run: the answered ones of the last round that was sent and of those that the target started after it.
        lease: how far the target may go on by itself from that round.
        prefetched_rounds: rounds that may follow the pending one, by its outcomes.
        next: the round that the last verdict named: prefetched, or of a mixed lease.
        processors: of logits before temperature; None: there are none. Used on the executor's thread only.
        grammar: follows its grammar; None: it has none. `follower` has the masks of the pending round.
        drafting: whether a draft works for the session, according to the round that was sent last.
        reported_rows: rows of the prefix whose logits are reported.
        features: the request for hidden states of committed tokens; None: none are sent.
        has_masks: whether the masks of the pending round are there; always, without a grammar.
    """

    max_rows: int
    arrived_at: float
    prefix: Prefix = NO_PREFIX
    keys: tuple[BlockKey, ...] = ()
    awaits: bytes | None = None
    released_blocks: int = 0
    is_admitted: bool = False
    reused_rows: int = 0
    prefilled_rows: int = 0
    first_step: float | None = None
    forward_ms: float = 0.0
    pending: PendingRound | None = None
    last: AnsweredRound | None = field(default=None, repr=False)
    run: list[AnsweredRound] = field(default_factory=list, repr=False)
    lease: Lease = Lease()
    prefetched_rounds: dict[Outcome, Round] = field(default_factory=dict, repr=False)
    next: Round | None = field(default=None, repr=False)
    processors: Processors | None = field(default=None, repr=False)
    grammar: GrammarSession | None = field(default=None, repr=False)
    follower: PrecomputedFollower = field(default_factory=PrecomputedFollower, repr=False)
    has_masks: bool = True
    drafting: bool = False
    reported_rows: ReportedRows = NO_ROWS
    features: FeatureRequest | None = None

    @property
    def can_verify(self) -> bool:
        """Whether its pending round may be in a step, apart from missing rows of the prefix."""
        return self.pending is not None and self.has_masks

    @property
    def prefill_length(self) -> int:
        """The number of prefix rows before the first round: those of all its tokens but the last."""
        return len(self.facts.token_ids) - 1

    @property
    def prefill_left(self) -> int:
        """The number of prefix rows that are not computed yet."""
        return self.prefill_length - self.prefilled_rows

    def reusable(self, rows: int) -> int:
        """How many of the first `rows` rows may come from other sessions: those with nothing to report."""
        rows = self.reported_rows.reusable(rows)
        return rows if self.features is None else min(rows, self.features.first_position)

    def prefill_item(self, rows: int) -> StepItem:
        """The step item of the next `rows` tokens of the prefix."""
        chunk = self.facts.token_ids[self.prefilled_rows : self.prefilled_rows + rows]
        return StepItem(
            self.key,
            self.prefilled_rows,
            chunk,
            logit_rows=tuple(self.reported_rows.within(self.prefilled_rows, rows)),
        )

    def accept(self, round_: Round, info: EngineInfo, now: float) -> Verdict | None:
        """Make a round the pending one, or return the verdict of a repeated one; a refused round changes nothing.

        A repeated round, even one that the target started by itself, may extend the lease.

        Raises:
            PrefixMismatch: the round doesn't continue the session's tokens.
            InvalidInput: ids, lengths or the proposal are outside their limits.
        """
        for place, answer in enumerate(self.run):
            if round_.base_length == answer.round_.base_length:
                require_same(answer.round_, round_, "was answered")
                self._extend(round_, place)
                return answer.verdict
        if self.pending is not None:
            require_same(self.pending.round_, round_, "waits for its verdict")
            self._extend(round_, len(self.run))
            return None
        self._check_continues(round_)
        check_round(round_, self.facts.acceptance, info, self.max_rows)
        self.pending = PendingRound(round_, now)
        self.prefetched_rounds = {}
        self.run.clear()
        self.lease, self.drafting = _lease_of(round_), round_.drafting
        return None

    def prefetch(self, prefetch: Prefetch, info: EngineInfo) -> None:
        """Keep proposals for outcomes of the pending round; those for another round are too late and are ignored.

        Raises:
            InvalidInput: a proposal is outside its limits, or acceptance isn't coupled; then none is kept.
        """
        mode = self.facts.acceptance
        require(mode is Acceptance.COUPLED, "prefetch", mode.value, "for coupled acceptance only")
        if self.pending is None or self.pending.round_.base_length != prefetch.base_length:
            return
        waiting = self.pending.round_
        rounds = {outcome: waiting.behind(outcome, proposal) for outcome, proposal in prefetch.proposals}
        for round_ in rounds.values():
            check_round(round_, mode, info, self.max_rows)
        rounds = self.prefetched_rounds | rounds
        few = len(rounds) <= MAX_PREFETCHED
        require(few, "prefetched proposals", len(rounds), f"at most {MAX_PREFETCHED} for one round")
        self.prefetched_rounds = rounds
        # A coordinator that prefetches for a round has the verdicts before it, and won't ask for those again.
        self.run.clear()

    def remember(self, round_: Round, verdict: Verdict, info: EngineInfo) -> Verdict:
        """Note the verdict of the pending round, whose rows are in KV now.

        Returns:
            The verdict. It names the next round if that was prefetched or is of a mixed lease.
        """
        self.next = self._named_next(round_, verdict, info)
        if self.next is not None:
            nodes = len(self.next.proposal) if self.next.proposal else 0
            verdict = replace(verdict, self_started=SelfStarted(self.next.base_length, nodes))
        self.pending = None
        self.prefetched_rounds = {}
        self.last = AnsweredRound(round_, verdict)
        self.run.append(self.last)
        return verdict

    def start_next(self, info: EngineInfo, now: float) -> bool:
        """Start the next round without the coordinator if it was prefetched or is leased; returns whether it did.

        The round needs no check: a prefetched one was checked when it came, and a leased one ends before the
        session's length, for which rows are reserved.
        """
        if self.last is None or self.pending is not None:
            return False
        round_, self.next = self.next, None
        if round_ is None:
            round_ = self._leased_round(self.last, info)
        elif not self.lease.is_mixed:
            # It ends the lease: the coordinator that prefetched it knows no later round of the run.
            self.lease = _lease_of(round_)
        if round_ is None:
            return False
        self.pending = PendingRound(round_, now)
        return True

    def _leased_round(self, last: AnsweredRound, info: EngineInfo) -> Round | None:
        token_id = last.verdict.token_ids[-1]
        position = last.round_.first_position + 1
        is_leased = not self.lease.is_mixed and position <= self.lease.last_position and last.round_.proposal is None
        if not is_leased or self._has_ended(token_id, position, info):
            return None
        return last.round_.following(token_id, self.lease.traceparent)

    def _has_ended(self, token_id: int, position: int, info: EngineInfo) -> bool:
        """Whether the text ends with this token, which is followed by `position`."""
        return token_id in self.facts.end_token_ids or position >= (self.facts.max_length or info.longest_session)

    def _named_next(self, round_: Round, verdict: Verdict, info: EngineInfo) -> Round | None:
        """The round that a verdict names, if any: what was prefetched for its outcome, or one of a mixed lease."""
        if not self.prefetched_rounds and not self.lease.is_mixed:
            return None
        decision = acceptance.decide(self.facts.acceptance, round_, verdict, self.facts.noise)
        outcome = decision.outcome(round_.base_length)
        next_round = self.prefetched_rounds.get(outcome)
        if next_round is None and self.lease.is_mixed:
            target_only = replace(round_.behind(outcome, None), traceparent=self.lease.traceparent)
            next_round = target_only if target_only.first_position <= self.lease.last_position else None
        if next_round is None or any(
            self._has_ended(each, next_round.first_position, info) for each in decision.committed
        ):
            return None
        return next_round

    def _extend(self, round_: Round, count: int) -> None:
        """Extend the lease by a repeated round, and drop the first `count` rounds of the run.

        A coordinator that sends a round has the verdicts before it, and won't ask for those again.
        """
        del self.run[:count]
        self.drafting = round_.drafting
        lease = _lease_of(round_)
        if lease.last_position > self.lease.last_position:
            self.lease = lease

    def round_item(self, round_: Round) -> StepItem:
        """The step item of a round: its committed tokens, then its proposal's nodes; logits from the root on.

        Missing rows of the prefix come before them.
        """
        committed, proposal = round_.committed, round_.proposal
        trunk = (*self.facts.token_ids[self.prefilled_rows : self.prefill_length], *committed)
        root = len(trunk) - 1
        nodes = proposal.token_ids if proposal else ()
        parents: tuple[int, ...] = ()
        if proposal is not None and not proposal.is_chain:
            parents = (*range(-1, root), *(root + 1 + parent for parent in proposal.parents))
        return StepItem(
            session=self.key,
            base_length=round_.base_length - self.prefill_left,
            token_ids=(*trunk, *nodes),
            parents=parents,
            kept_rows=self._kept_path(round_),
            logit_rows=tuple(range(root, len(trunk) + len(nodes))),
        )

    def newly_committed(self, round_: Round) -> tuple[int, ...]:
        """The tokens from after the last round's root up to the root of this one; at first the whole prefix."""
        if self.last is None:
            return (*self.facts.token_ids, *round_.committed[1:])
        proposal = self.last.round_.proposal
        path = proposal.path(round_.accepted_node) if proposal else ()
        return (*(proposal.token_ids[node] for node in path if proposal), *round_.committed)

    def _kept_path(self, round_: Round) -> tuple[int, ...]:
        """The rows of the accepted path; empty if they are in place already."""
        if self.last is None or self.last.round_.proposal is None:
            return ()
        path = self.last.round_.proposal.path(round_.accepted_node)
        if path == tuple(range(len(path))):
            return ()
        return tuple(self.last.round_.first_position + node for node in path)

    def _check_continues(self, round_: Round) -> None:
        if self.last is None:
            self._expect("base_length", self.prefill_length, round_.base_length)
            self._expect("accepted_node", ROOT, round_.accepted_node)
            self._expect("first committed token", self.facts.token_ids[-1], round_.committed[0])
            return
        previous = self.last.round_
        nodes = len(previous.proposal) if previous.proposal else 0
        if round_.accepted_node >= nodes:
            self._expect("accepted_node", f"in [-1, {nodes - 1}]", round_.accepted_node)
        path = previous.proposal.path(round_.accepted_node) if previous.proposal else ()
        self._expect("base_length", previous.first_position + len(path), round_.base_length)
        if self.facts.acceptance is Acceptance.COUPLED:
            self._check_coupled_path(self.last, path, round_)

    def _check_coupled_path(self, last: AnsweredRound, path: tuple[int, ...], round_: Round) -> None:
        """Check that the accepted path and the token after it are the target's own, as under coupled acceptance."""
        token_ids, node = last.verdict.token_ids, ROOT
        for child in path:
            assert last.round_.proposal is not None, "a path has nodes"
            if last.round_.proposal.token_ids[child] != token_ids[node + 1]:
                self._expect("accepted_node", f"on the path of the target's own tokens, at most {node}", path[-1])
            node = child
        self._expect("first committed token", token_ids[node + 1], round_.committed[0])


def make_processors(facts: SessionSpec, follower: Follower | None) -> Processors | None:
    """The processors of a session's logits before temperature; None: none. `follower`: of its grammar, if any."""
    sampling = facts.sampling
    if sampling.plain:
        return None
    return Processors(sampling, facts.prompt_length, facts.end_token_ids, follower if sampling.grammar else None)


def rows_to_reserve(facts: SessionSpec, info: EngineInfo) -> int:
    """KV rows of a session: its greatest length and the largest proposal after it, as far as the budget allows."""
    length = facts.max_length or info.longest_session
    return min(length + MAX_PROPOSAL_NODES, info.most_rows)


def shared_prefix(
    facts: SessionSpec, settings: EngineSettings, *, shares: bool
) -> tuple[Prefix, tuple[BlockKey, ...]]:
    """A session's prefix for the engine, and the keys of its blocks where it `shares` them.

    The prompt's last token is the root of the first round, so its row is a round's and not the prompt's.
    """
    tenant = "" if settings.share_prefixes else facts.tenant
    prefix = Prefix(facts.token_ids, facts.prompt_length - 1, tenant)
    return prefix, prefix_keys(prefix, reproducible=settings.reproducible) if shares else ()


def _lease_of(round_: Round) -> Lease:
    return Lease(round_.first_position + round_.lease, round_.traceparent, round_.has_mixed_lease)
