"""Every metric of every service: name, kind, unit, labels, meaning. Documented and recorded from here alone.

Names are OpenTelemetry's; `MetricSpec.exposed_name` is what Prometheus calls them. A label takes the values that
are listed here and no others, so the number of series is bounded: no session, request or tenant is ever a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paceline.protocol.errors import InternalError, PacelineError
from paceline.protocol.generation import FinishReason, Provenance
from paceline.protocol.proposal import MAX_PROPOSAL_NODES

COORDINATOR, TARGET, DRAFT, GATEWAY = "coordinator", "target", "draft", "gateway"
OTHER = "other"
"""Stands for every value that a label does not list."""

DURATIONS = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2,
    5,
    10,
)
"""Seconds. A round takes 1 ms (a table model) to 10 s (a long prompt); neighbours differ by at most 2.5 times."""
PART_DURATIONS = (0.00005, 0.0001, 0.0002, 0.0005, *DURATIONS)
"""Seconds. A part of a round may take next to nothing: accepting does."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
LENGTHS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
SHARES = (0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
"""0.03 is the budget's own bound (`coordinator/policy/group.py`)."""
REQUEST_DURATIONS = tuple(0.01 * 2**power for power in range(16))
FIRST_TOKEN_DURATIONS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30)
TOKEN_DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
"""The last three are those of the GenAI conventions, which begin later for tokens and end sooner for requests."""


class MetricKind(StrEnum):
    """What a metric is."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class MetricLabel:
    """A label of a metric.

    `values`: those that it can have; empty: they come from the configuration, and are few.
    `starts_at_zero`: whether series with this label are there, with 0, before anything is counted.
    """

    name: str
    values: tuple[str, ...] = ()
    starts_at_zero: bool = True

    @property
    def exposed_name(self) -> str:
        """The name that Prometheus reads."""
        return self.name.replace(".", "_")


@dataclass(frozen=True, eq=False)
class MetricSpec:
    """A metric; `services` have it."""

    name: str
    kind: MetricKind
    services: tuple[str, ...]
    meaning: str
    unit: str = ""
    labels: tuple[MetricLabel, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        """The name that Prometheus reads."""
        unit = "_seconds" if self.unit == "s" else ""
        total = "_total" if self.kind is MetricKind.COUNTER else ""
        return f"{self.name.replace('.', '_')}{unit}{total}"


def _counter(name: str, services: tuple[str, ...], meaning: str, *labels: MetricLabel) -> MetricSpec:
    return MetricSpec(name, MetricKind.COUNTER, services, meaning, "", labels)


def _gauge(name: str, services: tuple[str, ...], meaning: str, *labels: MetricLabel, unit: str = "") -> MetricSpec:
    return MetricSpec(name, MetricKind.GAUGE, services, meaning, unit, labels)


def _histogram(
    name: str,
    services: tuple[str, ...],
    meaning: str,
    buckets: tuple[float, ...],
    *labels: MetricLabel,
    unit: str = "s",
) -> MetricSpec:
    return MetricSpec(name, MetricKind.HISTOGRAM, services, meaning, unit, labels, buckets)


def reason_of(error: PacelineError) -> str:
    """An error as the value of a label."""
    return error.reason.lower()


def range_of(count: int) -> str:
    """A number of tokens as the value of a label: itself up to 8, then a range."""
    if count <= _EXACT:
        return str(max(0, count))
    return next((f"{low}-{high}" for low, high in _RANGES if count <= high), OTHER)


_EXACT = 8
_RANGES = ((9, 12), (13, 16), (17, 24), (25, 32), (33, 64))
LENGTH_RANGES = (*map(str, range(_EXACT + 1)), *(f"{low}-{high}" for low, high in _RANGES))
_REASONS = tuple(sorted({reason.lower() for reason in PacelineError.by_reason} | {InternalError.reason.lower()}))
_ASKING, _ENGINES = (COORDINATOR,), (TARGET, DRAFT)

_ROLE = MetricLabel("role", _ENGINES)
_PROPOSER = MetricLabel("proposer", ("ngram", "model"))
_REASON = MetricLabel("reason", _REASONS)
_MODEL = (
    MetricLabel("gen_ai.operation.name", ("text_completion", "chat")),
    MetricLabel("gen_ai.provider.name"),
    MetricLabel("gen_ai.request.model"),
)
_PROPOSAL_KIND = MetricLabel("kind", ("asked", "prepared"))

ROUND_DURATION = _histogram(
    "paceline.round.duration",
    _ASKING,
    "A round, from its start to its decision",
    DURATIONS,
    MetricLabel("proposer", ("none", "ngram", "model")),
)
ROUND_PART = _histogram(
    "paceline.round.part.duration",
    _ASKING,
    "A part of a round: `draft_wait` for the proposal, `wire` both ways, `queue` until the target's step, `verify` "
    "in it, `accept`",
    PART_DURATIONS,
    MetricLabel("part", ("draft_wait", "wire", "queue", "verify", "accept")),
)
ROUNDS_PROPOSED = _counter("paceline.rounds.proposed", _ASKING, "Rounds with a proposal", _PROPOSER)
ROUNDS_SELF_STARTED = _counter(
    "paceline.rounds.self_started", _ASKING, "Rounds that the target began by itself, by lease or prefetched proposal"
)
CACHE_LOOKUPS = _counter(
    "paceline.cache.lookups",
    _ASKING,
    "Rounds whose outcome was drafted for: `hit` with a proposal that was there, `miss` without",
    MetricLabel("result", ("hit", "miss")),
)
TOKENS_PROPOSED = _counter(
    "paceline.tokens.proposed", _ASKING, "Proposed tokens along a proposal's longest path", _PROPOSER
)
TOKENS_ACCEPTED = _counter(
    "paceline.tokens.accepted",
    _ASKING,
    "Accepted tokens by their place in the proposal, 0 the first",
    MetricLabel("position", tuple(map(str, range(MAX_PROPOSAL_NODES))), starts_at_zero=False),
)
TOKENS_COMMITTED = _counter(
    "paceline.tokens.committed",
    _ASKING,
    "Tokens of answers by where they came from",
    MetricLabel("provenance", tuple(each.value for each in Provenance)),
)
TOKENS_PROMPT = _counter("paceline.tokens.prompt", _ASKING, "Tokens of prompts, resumed output included")
REASONING_ROUND_DURATION = _histogram(
    "paceline.reasoning.round.duration",
    _ASKING,
    "Of all rounds those that began inside a span of reasoning, of models that mark it with tokens of their own",
    DURATIONS,
    MetricLabel("proposer", ("none", "ngram", "model")),
)
REASONING_TOKENS = _counter(
    "paceline.reasoning.tokens",
    _ASKING,
    "Tokens that these rounds `proposed` and that were `accepted`; each committed one more",
    MetricLabel("kind", ("proposed", "accepted")),
)
REQUESTS_ACTIVE = _gauge(
    "paceline.requests.active",
    _ASKING,
    "Requests that are `waiting` for their first token, or `running`",
    MetricLabel("state", ("waiting", "running")),
)
REQUESTS_ENDED = _counter(
    "paceline.requests.ended",
    _ASKING,
    "Requests by how they ended: the finish reason, or the error's reason",
    MetricLabel("outcome", (*(each.value for each in FinishReason), *_REASONS)),
)
REQUEST_ACCEPTANCE = _histogram(
    "paceline.request.acceptance_length",
    _ASKING,
    "Of requests with proposals: tokens of a round with one, its accepted ones and the target's own",
    LENGTHS,
    unit="",
)
REQUEST_OVERTIME = _histogram(
    "paceline.request.overtime",
    _ASKING,
    "Share of a request's time that its account has beyond target-only's; bucket 0: those that are not slower",
    SHARES,
    unit="",
)
REQUESTS_OVER_BOUND = _counter(
    "paceline.requests.over_bound", _ASKING, "Requests that ended with more on their account than its bound"
)
ROUNDS_PLANNED = _counter(
    "paceline.planner.rounds",
    _ASKING,
    "Planned rounds by way and longest path of the proposal, of ngram the mean",
    MetricLabel("way", ("none", "ngram", "wait", "ahead")),
    MetricLabel("draft_tokens", LENGTH_RANGES, starts_at_zero=False),
)
ROW_PRICE = _gauge(
    "paceline.planner.row.duration",
    _ASKING,
    "What a second row costs a step of the target, as the planner believes",
    unit="s",
)
_MODE = MetricLabel("mode", ("rest", "matches", "drafts"))
GROUP_MODE = _gauge(
    "paceline.group.mode",
    _ASKING,
    "1 for the mode that the requests of a target are in, or would be in if as many shared it as did last; else 0",
    MetricLabel("target"),
    _MODE,
)
GROUP_GAIN = _gauge(
    "paceline.group.gain",
    _ASKING,
    "Tokens that they committed in a mode, as it ran last, beside those of resting in the same time; absent before",
    MetricLabel("target"),
    MetricLabel("mode", ("matches", "drafts")),
)
GROUP_WAIT = _gauge(
    "paceline.group.wait_steps",
    _ASKING,
    "Steps of rest until a mode is looked at, or until its pause after a loss ends; 0: it runs, or is not worth it",
    MetricLabel("target"),
    _MODE,
)
FALLBACKS = _counter(
    "paceline.fallbacks",
    _ASKING,
    "Requests that went on without: the draft was late, its link lost, it failed; the target refused a proposal, or "
    "its session was opened anew",
    MetricLabel("cause", ("draft_late", "draft_lost", "draft_failed", "proposal_refused", "target_lost")),
)
RELOAD_FAILURES = _counter(
    "paceline.reload.failures",
    (COORDINATOR, TARGET, DRAFT, GATEWAY),
    "Times that a file was read again and was not right, or endpoints were not found: what was known before stays",
    MetricLabel("file", ("api_keys", "tls", "endpoints")),
)
REQUEST_DURATION = _histogram(
    "gen_ai.server.request.duration",
    _ASKING,
    "A request, from its arrival to its end",
    REQUEST_DURATIONS,
    *_MODEL,
    MetricLabel("error.type", ("", *_REASONS)),
)
FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token",
    _ASKING,
    "From a request's arrival to its first committed token",
    FIRST_TOKEN_DURATIONS,
    *_MODEL,
)
TOKEN_DURATION = _histogram(
    "gen_ai.server.time_per_output_token",
    _ASKING,
    "A request's time per token behind the first round",
    TOKEN_DURATIONS,
    *_MODEL,
)
SESSIONS = _gauge(
    "paceline.sessions.open",
    _ENGINES,
    "Open sessions that are `waiting` for room, grammar or prefix, or `running`",
    _ROLE,
    MetricLabel("state", ("waiting", "running")),
)
QUEUE = _gauge(
    "paceline.queue.length",
    _ENGINES,
    "What waits for a step: at a target sessions and rounds, at a draft service proposals",
    _ROLE,
)
KV_ROWS = _gauge("paceline.kv.rows", _ENGINES, "KV rows that sessions hold", _ROLE)
KV_USAGE = _gauge("paceline.kv.usage", _ENGINES, "The same as a share of all KV rows, 0 to 1", _ROLE)
STEP_DURATION = _histogram("paceline.step.duration", _ENGINES, "A step: forward pass and draws", DURATIONS, _ROLE)
STEP_ROWS = _histogram("paceline.step.rows", _ENGINES, "Rows of a step", COUNTS, _ROLE, unit="")
STEP_SESSIONS = _histogram("paceline.step.sessions", _ENGINES, "Sessions of a step", COUNTS, _ROLE, unit="")
SESSIONS_REFUSED = _counter("paceline.sessions.refused", _ENGINES, "Sessions that were not opened", _ROLE, _REASON)
SESSIONS_FAILED = _counter("paceline.sessions.failed", _ENGINES, "Sessions that the service ended", _ROLE, _REASON)
GRAMMAR_WORKERS = _gauge("paceline.grammar.workers", _ENGINES, "Processes that follow a grammar", _ROLE)
PREFIX_TOKENS = _counter(
    "paceline.prefix.tokens",
    (TARGET,),
    "Prefix tokens of admitted sessions: `reused` from blocks that were there, or `computed`",
    MetricLabel("source", ("reused", "computed")),
)
DRAFT_PROPOSALS = _counter(
    "paceline.draft.proposals",
    (DRAFT,),
    "Proposals sent: `asked` for by a round, or `prepared` for an outcome; one that grows counts each time",
    _PROPOSAL_KIND,
)
DRAFT_TOKENS = _counter("paceline.draft.tokens", (DRAFT,), "Tokens of these proposals", _PROPOSAL_KIND)
FEATURE_BYTES = _counter(
    "paceline.features.bytes", (COORDINATOR,), "Bytes of the target's hidden states that came for drafters"
)
SHADOW_RANKS = ("1", "2", "3-4", "5-8", "above", "none")
SHADOW = _counter(
    "paceline.draft.shadow",
    (DRAFT,),
    "Committed tokens by their rank in the drafter's order; `none`: not in it",
    MetricLabel("rank", SHADOW_RANKS),
)
HTTP_DURATION = _histogram(
    "http.server.request.duration",
    (GATEWAY,),
    "An HTTP request, from its arrival to its last byte",
    REQUEST_DURATIONS,
    MetricLabel("http.route"),
    MetricLabel("http.response.status_code"),
)

CATALOGUE: tuple[MetricSpec, ...] = tuple(each for each in globals().values() if isinstance(each, MetricSpec))


def of_service(service: str) -> tuple[MetricSpec, ...]:
    """What a service has."""
    return tuple(spec for spec in CATALOGUE if service in spec.services)
