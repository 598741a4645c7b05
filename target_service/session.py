"""One session on the target: what it holds, which round waits for a step, and the checks of what arrives. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.engine.blocks import BlockKey, prefix_keys
from paceline.engine.interface import NO_PREFIX, EngineInfo, Prefix, StepItem
from paceline.grammars.sessions import GrammarSession, PrecomputedFollower
from paceline.protocol.errors import PrefixMismatch, Unsupported, require, require_ids
from paceline.protocol.features import FeatureRequest
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT, Acceptance, Outcome, Proposal
from paceline.protocol.session import SessionSpec
from paceline.protocol.target import MAX_PREFETCHED, Prefetch, Round, SelfStarted, TargetOpen, Verdict
from paceline.rpc.sessions import ServedSession
from paceline.runtime.config import EngineSettings
from paceline.sampling import acceptance, processors
from paceline.sampling.processors import Follower, Processors
from target_service.prompt_rows import NO_ROWS, WantedRows


@dataclass(frozen=True)
class PendingRound:
    """A round that waits for a step; `arrived` on the monotonic clock, seconds."""

    round_: Round
    arrived: float


@dataclass(frozen=True)
class AnsweredRound:
    """A round and what it got."""

    round_: Round
    verdict: Verdict


@dataclass(frozen=True)
class Lease:
    """The last position that a session may draw without its coordinator, and the parent of those rounds' spans."""

    until: int = 0
    traceparent: str = ""


@dataclass(eq=False)
class Session(ServedSession):
    """A session's state; changed under the scheduler's lock.

    Attributes:
        max_rows: KV rows that are reserved for it; `key` is its number in the engine.
        prefilled: tokens of the prefix whose rows are in KV, of which the first `reused` came from other sessions.
            After the first round KV holds the rows of `last.round_`, too.
        keys, awaits, claimed: kept by `PendingPrefixes`: the blocks of the prefix, the one that the session waits
            for, and how many from the first on it no longer claims.
        admitted: whether its rows are reserved.
        forward_ms: of all steps that computed the prefix; `first_step` is when the first of them began.
        pending: the round that waits for a step.
        run: the last round that was sent and those that the target began behind it, as far as they are answered.
        lease: how far the target may go on by itself from that round.
        prefetched: rounds that may follow the pending one, by its outcomes.
        next: the one of them whose outcome came true.
        processors: what logits go through before temperature (None: nothing); touched on the executor's thread only.
        grammar: its place in its grammar (None: it has none), and `foreseen`, what may come in the pending round.
        drafting: whether a draft works for the session, as the round that was sent last says.
        wanted: rows of the prefix whose logits are reported.
        features: hidden states that are sent of committed tokens; None: none.
        masked: whether `foreseen` is known for the pending round; without a grammar there is nothing to know.
    """

    max_rows: int
    arrived: float
    prefix: Prefix = NO_PREFIX
    keys: tuple[BlockKey, ...] = ()
    awaits: bytes | None = None
    claimed: int = 0
    admitted: bool = False
    reused: int = 0
    prefilled: int = 0
    first_step: float | None = None
    forward_ms: float = 0.0
    pending: PendingRound | None = None
    last: AnsweredRound | None = field(default=None, repr=False)
    run: list[AnsweredRound] = field(default_factory=list, repr=False)
    lease: Lease = Lease()
    prefetched: dict[Outcome, Round] = field(default_factory=dict, repr=False)
    next: Round | None = field(default=None, repr=False)
    processors: Processors | None = field(default=None, repr=False)
    grammar: GrammarSession | None = field(default=None, repr=False)
    foreseen: PrecomputedFollower = field(default_factory=PrecomputedFollower, repr=False)
    masked: bool = True
    drafting: bool = False
    wanted: WantedRows = NO_ROWS
    features: FeatureRequest | None = None

    @property
    def can_verify(self) -> bool:
        """Whether its pending round may be in a step, but for what is left of the prefix."""
        return self.pending is not None and self.masked

    @property
    def prefill_length(self) -> int:
        """Rows of the prefix that are computed before the first round: those of all its tokens but the last."""
        return len(self.facts.token_ids) - 1

    @property
    def prefill_left(self) -> int:
        """Rows of the prefix that are not computed yet."""
        return self.prefill_length - self.prefilled

    def reusable(self, rows: int) -> int:
        """How many of the first `rows` rows may come from other sessions: those of which nothing is to be told."""
        rows = self.wanted.reusable(rows)
        return rows if self.features is None else min(rows, self.features.first_position)

    def prefill_item(self, rows: int) -> StepItem:
        """The next `rows` tokens of the prefix."""
        chunk = self.facts.token_ids[self.prefilled : self.prefilled + rows]
        return StepItem(self.key, self.prefilled, chunk, logit_rows=tuple(self.wanted.within(self.prefilled, rows)))

    def accept(self, round_: Round, info: EngineInfo, now: float) -> Verdict | None:
        """Take a round in, or return the verdict of one that is repeated; a refused round changes nothing.

        A repeated round, even one that the target began by itself, may extend the lease.

        Raises:
            PrefixMismatch: the round doesn't continue what the session holds.
            InvalidInput: ids, lengths or the proposal are outside their limits.
        """
        for place, answered in enumerate(self.run):
            if round_.base_length == answered.round_.base_length:
                _require_same(answered.round_, round_, "was answered")
                self._extend(round_, place)
                return answered.verdict
        if self.pending is not None:
            _require_same(self.pending.round_, round_, "waits for its verdict")
            self._extend(round_, len(self.run))
            return None
        self._check_continues(round_)
        check_round(round_, self.facts.acceptance, info, self.max_rows)
        self.pending = PendingRound(round_, now)
        self.prefetched = {}
        self.run.clear()
        self.lease, self.drafting = _lease_of(round_), round_.drafting
        return None

    def prefetch(self, prefetch: Prefetch, info: EngineInfo) -> None:
        """Keep proposals for outcomes of the pending round; those for another round come too late.

        Raises:
            InvalidInput: a proposal is outside its limits, or acceptance isn't coupled; then none is kept.
        """
        mode = self.facts.acceptance
        require(mode is Acceptance.COUPLED, "prefetch", mode.value, "for coupled acceptance only")
        if self.pending is None or self.pending.round_.base_length != prefetch.base_length:
            return
        waiting = self.pending.round_
        prefetched = {outcome: waiting.behind(outcome, proposal) for outcome, proposal in prefetch.proposals}
        for round_ in prefetched.values():
            check_round(round_, mode, info, self.max_rows)
        prefetched = self.prefetched | prefetched
        few = len(prefetched) <= MAX_PREFETCHED
        require(few, "prefetched proposals", len(prefetched), f"at most {MAX_PREFETCHED} for one round")
        self.prefetched = prefetched
        # A coordinator that prefetches for a round has the verdicts before it, and won't ask for those again.
        self.run.clear()

    def remember(self, round_: Round, verdict: Verdict, info: EngineInfo) -> Verdict:
        """The pending round is answered: its rows are what the session holds now.

        Returns:
            The verdict. It names the next round if a prefetched proposal starts that.
        """
        self.next = self._prefetched_for(round_, verdict, info)
        if self.next is not None and self.next.proposal is not None:
            verdict = replace(verdict, self_started=SelfStarted(self.next.base_length, len(self.next.proposal)))
        self.pending = None
        self.prefetched = {}
        self.last = AnsweredRound(round_, verdict)
        self.run.append(self.last)
        return verdict

    def start_next(self, info: EngineInfo, now: float) -> bool:
        """Start the next round without the coordinator, if it was prefetched or is leased; says whether it did.

        The round needs no check: a prefetched one was checked when it came, and a leased one ends before the
        session's length, for which rows are reserved.
        """
        if self.last is None or self.pending is not None:
            return False
        round_, self.next = self.next, None
        if round_ is None:
            round_ = self._leased_round(self.last, info)
        else:
            # It ends the lease: the coordinator that prefetched it knows no later round of the run.
            self.lease = _lease_of(round_)
        if round_ is None:
            return False
        self.pending = PendingRound(round_, now)
        return True

    def _leased_round(self, last: AnsweredRound, info: EngineInfo) -> Round | None:
        drawn = last.verdict.token_ids[-1]
        position = last.round_.first_position + 1
        leased = last.round_.proposal is None and position <= self.lease.until
        if not leased or self._has_ended(drawn, position, info):
            return None
        return last.round_.following(drawn, self.lease.traceparent)

    def _has_ended(self, drawn: int, position: int, info: EngineInfo) -> bool:
        """Whether the text ends with a token, before `position`."""
        return drawn in self.facts.end_token_ids or position >= (self.facts.max_length or info.longest_session)

    def _prefetched_for(self, round_: Round, verdict: Verdict, info: EngineInfo) -> Round | None:
        """The round that was prefetched for the outcome that the verdict gives this one; None if the text ends."""
        if not self.prefetched:
            return None
        decision = acceptance.decide(self.facts.acceptance, round_, verdict, self.facts.noise)
        prefetched = self.prefetched.get(decision.outcome(round_.base_length))
        if prefetched is None or any(
            self._has_ended(each, prefetched.first_position, info) for each in decision.committed
        ):
            return None
        return prefetched

    def _extend(self, round_: Round, seen: int) -> None:
        """A coordinator that sends a round has the verdicts before it, and won't ask for those again."""
        del self.run[:seen]
        self.drafting = round_.drafting
        lease = _lease_of(round_)
        if lease.until > self.lease.until:
            self.lease = lease

    def round_item(self, round_: Round) -> StepItem:
        """The rows of a round: its committed tokens, then its proposal's nodes; logits from the root on.

        What is left of the prefix comes before them.
        """
        committed, proposal = round_.committed, round_.proposal
        trunk = (*self.facts.token_ids[self.prefilled : self.prefill_length], *committed)
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
        """Tokens up to the root of a round, from where the last round's root ended; the whole prefix at first."""
        if self.last is None:
            return (*self.facts.token_ids, *round_.committed[1:])
        proposal = self.last.round_.proposal
        path = proposal.path(round_.accepted_node) if proposal else ()
        return (*(proposal.token_ids[node] for node in path if proposal), *round_.committed)

    def _kept_path(self, round_: Round) -> tuple[int, ...]:
        """Rows of the accepted path where they don't stand in place already."""
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
        """Coupled: the target emits its own tokens, so the path kept and the token after it are its own."""
        drawn, node = last.verdict.token_ids, ROOT
        for child in path:
            assert last.round_.proposal is not None, "a path has nodes"
            if last.round_.proposal.token_ids[child] != drawn[node + 1]:
                self._expect("accepted_node", f"on the path of the target's own tokens, at most {node}", path[-1])
            node = child
        self._expect("first committed token", drawn[node + 1], round_.committed[0])


def check_open(command: TargetOpen, info: EngineInfo) -> None:
    """Refuse a session that could never be served.

    Raises:
        InvalidInput: a token id outside the vocabulary, or a session longer than context or KV budget.
        Unsupported: hidden states are asked for that the engine can't give.
    """
    facts = command.spec
    if command.features is not None:
        _check_features(command.features, info)
    limit = info.longest_session
    length = max(len(facts.token_ids), facts.max_length)
    require(length <= limit, "session length", length, f"at most {limit}, the context as far as KV holds it")
    vocab_size = info.fingerprint.vocab_size
    require_ids("token_ids", facts.token_ids, vocab_size)
    processors.check_ids(facts.sampling, facts.end_token_ids, vocab_size)


def _check_features(wanted: FeatureRequest, info: EngineInfo) -> None:
    if info.features is None:
        raise Unsupported(f"feature layers = {list(wanted.need.layers)}: this target sends no hidden states")
    info.features.check(wanted.need)


def make_processors(facts: SessionSpec, follower: Follower | None) -> Processors | None:
    """What a session's logits go through before temperature; None: nothing. `follower` is of its grammar, if any."""
    sampling = facts.sampling
    if sampling.plain:
        return None
    return Processors(sampling, facts.prompt_length, facts.end_token_ids, follower if sampling.grammar else None)


def check_round(round_: Round, acceptance: Acceptance, info: EngineInfo, max_rows: int) -> None:
    """Check ids, lengths and the proposal of a round.

    Raises:
        InvalidInput: naming field, value and limit.
    """
    vocab_size = info.fingerprint.vocab_size
    require_ids("committed token_ids", round_.committed, vocab_size)
    proposal = round_.proposal
    depth = max(proposal.depths, default=0) if proposal else 0
    length = round_.first_position + depth
    require(length <= info.max_length, "sequence length", length, f"at most {info.max_length}, the context")
    rows = round_.first_position + (len(proposal) if proposal else 0)
    require(rows <= max_rows, "KV rows of the session", rows, f"at most {max_rows}")
    if proposal is not None:
        proposal.check_for(acceptance, vocab_size)


def rows_to_reserve(facts: SessionSpec, info: EngineInfo) -> int:
    """KV rows of a session: its greatest length and the largest proposal behind it, as far as the budget allows."""
    length = facts.max_length or info.longest_session
    return min(length + MAX_PROPOSAL_NODES, info.max_kv_rows)


def shared_prefix(facts: SessionSpec, settings: EngineSettings) -> tuple[Prefix, tuple[BlockKey, ...]]:
    """What the engine is told of a session's prefix, and the keys of its blocks where prefixes are shared.

    The prompt's last token is the root of the first round, so its row is a round's and not the prompt's.
    """
    tenant = "" if settings.share_prefixes else facts.tenant
    prefix = Prefix(facts.token_ids, facts.prompt_length - 1, tenant)
    return prefix, prefix_keys(prefix, reproducible=settings.reproducible) if settings.prefix_reuse else ()


def _lease_of(round_: Round) -> Lease:
    return Lease(round_.first_position + round_.lease, round_.traceparent)


def _require_same(held: Round, got: Round, state: str) -> None:
    """A repeated round may differ in its trace context, its lease, whether a draft works meanwhile, and in what no
    draw looks at: where its proposal comes from, and under coupled acceptance how probable it was."""
    for name in ("base_length", "accepted_node", "committed", "proposal"):
        expected, found = getattr(held, name), getattr(got, name)
        if _drawn_from(expected) != _drawn_from(found):
            raise PrefixMismatch(
                f"session {held.session_id} {name}: expected {expected}, got {found} "
                f"(the round at base length {held.base_length} {state})",
                metadata={"field": name, "expected": str(expected), "got": str(found)},
            )


def _drawn_from(fact: object) -> object:
    if not isinstance(fact, Proposal):
        return fact
    return fact.token_ids, fact.parents, fact.supports, fact.draft_probabilities if fact.supports else ()
