"""The frozen objects that flow between stages. Pure: no protobuf, no grpc, no numpy.

Each object checks its own limits when it is made, so whatever holds one can
rely on it; `InvalidInput` names field, value and limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from paceline.errors import InvalidInput

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
LIFE_SIGN_MS = 250
"""A target that has sessions of a link open shows on it so often that it is alive."""
MAX_PROPOSAL_NODES = 64
MAX_RUN_AHEAD = 64
"""Rounds that a target may begin by itself behind one that was sent."""
MAX_STAGED = 64
"""Most proposals that may be staged for one round."""
MAX_SUPPORT_ENTRIES = 256
MAX_TIME_LEFT_MS = (1 << 32) - 1
"""Longest time that a service is told a request has left, 49.7 days: what the wire's field holds."""
MAX_DRAFTER_BYTES = 512
"""Of a drafter's name, which every round's record repeats: those of a whole text must fit one message."""
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_TEMPERATURE = 100.0
REPETITION_PENALTIES = (0.01, 100.0)
MAX_PENALTY = 2.0
"""Of presence and frequency, either sign, as OpenAI's API has it."""
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_GRAMMAR_BYTES = 1 << 16
MAX_SAMPLES = 128
SUPPORT_SUM_TOLERANCE = 1e-3
AUTO = "auto"
"""Drafter of requests that leave the choice to the coordinator's policy."""
NGRAM = "ngram"
"""The coordinator's own drafter: suffix matches over prompt and output."""
NONE = "none"
"""No drafter: every round is target-only."""
ROOT = -1
"""The parent of a proposal's first nodes: the last committed token."""


class Acceptance(Enum):
    """The rule that turns a proposal and a verdict into committed tokens."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"


class Provenance(Enum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    TARGET = "target"


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


def require(condition: bool, name: str, value: object, limit: str) -> None:
    """Raise `InvalidInput` naming field, value and limit unless the condition holds."""
    if not condition:
        raise InvalidInput.of(name, value, limit)


class GrammarKind(Enum):
    """The notations that a grammar can be written in; the value is the field's name."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True)
class Grammar:
    """A formal language that the output must belong to; the target's library has the last word on its text."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        size = len(self.text.encode("utf-8", "surrogatepass"))
        in_range = 1 <= size <= MAX_GRAMMAR_BYTES
        require(in_range, f"{self.kind.value} bytes", size, f"in [1, {MAX_GRAMMAR_BYTES}]")
        if self.kind is GrammarKind.JSON_SCHEMA:
            self._check_json()

    def _check_json(self) -> None:
        try:
            schema = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput.of(self.kind.value, self.text, f"JSON ({error})") from error
        require(isinstance(schema, dict), self.kind.value, self.text, "a JSON object")


@dataclass(frozen=True)
class SamplingParams:
    """The target's chain, applied in the order of `docs/sampling.md`.

    temperature 0 is greedy: a point mass on the largest logit, ties to the lowest id. `logit_bias` is
    kept as ascending (id, bias) pairs.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        temperature_ok = math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE
        require(temperature_ok, "temperature", self.temperature, f"in [0, {MAX_TEMPERATURE:g}]")
        require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 keeps all)")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        logprobs_ok = self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS
        require(logprobs_ok, "logprobs", self.logprobs, f"in [0, {MAX_TOP_LOGPROBS}]")
        self._check_penalties()
        self._check_logit_bias()
        self._check_bad_words()
        require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        # Behind a grammar's last token nothing but the end may come: both can't be kept.
        decides = self.grammar is None or self.min_tokens == 0
        require(decides, "min_tokens", self.min_tokens, "0 with a grammar, which decides where a text may end")

    def _check_penalties(self) -> None:
        low, high = REPETITION_PENALTIES
        # A float32 of the wire may be a hair outside the decimal limit.
        in_range = low * (1 - 1e-6) <= self.repetition_penalty <= high
        require(in_range, "repetition_penalty", self.repetition_penalty, f"in [{low:g}, {high:g}]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(abs(value) <= MAX_PENALTY, name, value, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")

    def _check_logit_bias(self) -> None:
        object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias)))
        entries = len(self.logit_bias)
        require(entries <= MAX_LOGIT_BIAS_ENTRIES, "logit_bias entries", entries, f"at most {MAX_LOGIT_BIAS_ENTRIES}")
        distinct = len({token_id for token_id, _ in self.logit_bias})
        require(distinct == entries, "logit_bias ids", entries, f"distinct ({distinct} are)")
        for token_id, bias in self.logit_bias:
            require(token_id >= 0, "logit_bias id", token_id, "at least 0")
            in_range = abs(bias) <= MAX_LOGIT_BIAS
            require(in_range, f"logit_bias of {token_id}", bias, f"in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]")

    def _check_bad_words(self) -> None:
        require(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", len(self.bad_words), f"at most {MAX_BAD_WORDS}")
        for word in self.bad_words:
            size_ok = 1 <= len(word) <= MAX_BAD_WORD_TOKENS
            require(size_ok, "bad_words tokens", len(word), f"1 to {MAX_BAD_WORD_TOKENS} of each")
            require(min(word) >= 0, "bad_words id", min(word), "at least 0")

    @property
    def greedy(self) -> bool:
        """Whether the processed distribution is a point mass."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether logits change with the tokens that came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def forbids(self) -> bool:
        """Whether tokens are excluded before the filters look at the row."""
        return bool(self.bad_words) or self.min_tokens > 0 or self.grammar is not None

    @property
    def plain(self) -> bool:
        """Whether a row's distribution is a function of its logits alone, the same at every position."""
        return not (self.penalises or self.forbids or self.logit_bias)


@dataclass(frozen=True)
class NoiseKey:
    """What fixes every draw of one request, apart from stream and position."""

    seed: int
    sample_index: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.seed < 1 << 64, "seed", self.seed, "in [0, 2^64)")
        require(0 <= self.sample_index < 1 << 24, "sample_index", self.sample_index, "in [0, 2^24)")


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a model to its peers; an empty tokenizer fits any vocabulary."""

    model: str = ""
    tokenizer: str = ""
    vocab_size: int = 0
    numeric: str = ""


@dataclass(frozen=True)
class Hello:
    """First message of a link, from the coordinator."""

    incarnation: str
    fingerprint: Fingerprint = Fingerprint()
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Welcome:
    """First message of a link, from the service."""

    incarnation: str
    fingerprint: Fingerprint
    max_length: int
    max_sessions: int
    max_proposal_nodes: int = MAX_PROPOSAL_NODES
    max_frame_bytes: int = MAX_FRAME_BYTES
    drafters: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION
    max_run_ahead: int = 0
    max_staged: int = 0


@dataclass(frozen=True)
class SparseDistribution:
    """q over the tokens that one drafted token was really sampled from (float32 values)."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        entries = len(self.token_ids)
        require(1 <= entries <= MAX_SUPPORT_ENTRIES, "support entries", entries, f"in [1, {MAX_SUPPORT_ENTRIES}]")
        same = len(self.probabilities) == entries
        require(same, "support probabilities", len(self.probabilities), f"{entries}, one for each id")
        ascending = all(a < b for a, b in zip(self.token_ids, self.token_ids[1:], strict=False))
        require(ascending and self.token_ids[0] >= 0, "support token_ids", self.token_ids, "strictly ascending")
        positive = all(q > 0 and math.isfinite(q) for q in self.probabilities)
        require(positive, "support probabilities", min(self.probabilities), "positive and finite")
        total = math.fsum(self.probabilities)
        in_tolerance = abs(total - 1) <= SUPPORT_SUM_TOLERANCE
        require(in_tolerance, "sum of support probabilities", total, f"1 within {SUPPORT_SUM_TOLERANCE:g}")

    def probability(self, token_id: int) -> float:
        """q(token_id); 0 outside the support."""
        return dict(zip(self.token_ids, self.probabilities, strict=True)).get(token_id, 0.0)


@dataclass(frozen=True)
class Proposal:
    """Proposed tokens: a chain, or a tree in topological order.

    `parents[i]` is the index of node i's parent, `ROOT` for a child of the last
    committed token; a chain's parents are (-1, 0, 1, …). `supports` is empty
    unless the acceptance is rejection or block.
    """

    proposal_id: int
    token_ids: tuple[int, ...]
    draft_probabilities: tuple[float, ...]
    parents: tuple[int, ...] = ()
    supports: tuple[SparseDistribution, ...] = ()
    drafter: str = ""

    def __post_init__(self) -> None:
        nodes = len(self.token_ids)
        require(nodes <= MAX_PROPOSAL_NODES, "proposal nodes", nodes, f"at most {MAX_PROPOSAL_NODES}")
        if not self.parents:
            object.__setattr__(self, "parents", tuple(range(-1, nodes - 1)))
        require(len(self.parents) == nodes, "proposal parents", len(self.parents), f"{nodes}, one for each node")
        for node, parent in enumerate(self.parents):
            require(ROOT <= parent < node, f"proposal parent of node {node}", parent, f"in [-1, {node - 1}]")
        same = len(self.draft_probabilities) == nodes
        require(same, "draft_probabilities", len(self.draft_probabilities), f"{nodes}, one for each node")
        for q in self.draft_probabilities:
            require(math.isfinite(q) and 0 < q <= 1, "draft_probability", q, "in (0, 1]")
        self._check_supports()

    def _check_supports(self) -> None:
        if not self.supports:
            return
        require(self.is_chain, "proposal parents", self.parents, "a chain when supports are given")
        same = len(self.supports) == len(self.token_ids)
        require(same, "proposal supports", len(self.supports), f"{len(self.token_ids)}, one for each node")
        for token_id, q, support in zip(self.token_ids, self.draft_probabilities, self.supports, strict=True):
            found = support.probability(token_id)
            require(found > 0, f"q of drafted token {token_id}", found, "positive in its support")
            require(abs(found - q) <= 1e-6, f"q of drafted token {token_id}", q, f"its support's {found!r}")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs from the one before it."""
        return self.parents == tuple(range(-1, len(self.token_ids) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root's children have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def first(self, nodes: int) -> Proposal:
        """The same proposal cut to its first nodes; itself if it has no more."""
        if nodes >= len(self):
            return self
        return replace(
            self,
            token_ids=self.token_ids[:nodes],
            draft_probabilities=self.draft_probabilities[:nodes],
            parents=self.parents[:nodes],
            supports=self.supports[:nodes],
        )

    def within(self, depth: int) -> Proposal:
        """The first nodes, up to the first that is deeper; itself if none is."""
        deeper = (node for node, at in enumerate(self.depths) if at > depth)
        return self.first(next(deeper, len(self)))

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the root's child down to `node`; empty for `ROOT`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))


@dataclass(frozen=True)
class Outcome:
    """How a round ended: its base length, the last accepted node, the token after it."""

    base_length: int
    node: int
    next_token: int


@dataclass(frozen=True)
class TargetOpen:
    """Begins a session on the target, which computes all but the last prefix token."""

    session_id: int
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    noise: NoiseKey
    acceptance: Acceptance
    feature_layers: tuple[int, ...] = ()
    time_left_ms: int | None = None
    traceparent: str = ""
    max_length: int = 0
    end_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_prefix(self.token_ids, self.prompt_length, self.max_length)


@dataclass(frozen=True)
class Round:
    """What the target keeps, what is new to it, what it verifies.

    `base_length` counts KV rows kept (accepted rows of the previous round
    included) and is the round key of rejection and block acceptance. `run_ahead`
    counts the target-only rounds that the target may begin by itself behind it.
    """

    session_id: int
    base_length: int
    accepted_node: int
    committed: tuple[int, ...]
    proposal: Proposal | None = None
    traceparent: str = ""
    run_ahead: int = 0

    def __post_init__(self) -> None:
        require(len(self.committed) >= 1, "round committed tokens", len(self.committed), "at least 1")
        require(self.base_length >= 0, "base_length", self.base_length, "at least 0")
        require(self.accepted_node >= ROOT, "accepted_node", self.accepted_node, "at least -1")
        require(0 <= self.run_ahead <= MAX_RUN_AHEAD, "run_ahead", self.run_ahead, f"in [0, {MAX_RUN_AHEAD}]")
        alone = self.proposal is None or not self.run_ahead
        require(alone, "run_ahead", self.run_ahead, "0 with a proposal")

    @property
    def first_position(self) -> int:
        """Absolute position of the token that the root draws."""
        return self.base_length + len(self.committed)

    def following(self, drawn: int, traceparent: str = "") -> Round:
        """The target-only round behind this one, which is target-only and drew `drawn`.

        It is what a coordinator would send, so its draws are keyed alike whoever begins it.
        """
        return Round(self.session_id, self.first_position, ROOT, (drawn,), traceparent=traceparent)

    def behind(self, outcome: Outcome, proposal: Proposal) -> Round:
        """The round that a coordinator would send with this proposal if this one ended so.

        Raises:
            InvalidInput: the outcome's node is none of this round's.
        """
        nodes = len(self.proposal) if self.proposal else 0
        require(outcome.node < nodes, "outcome node", outcome.node, f"in [-1, {nodes - 1}]")
        kept = len(self.proposal.path(outcome.node)) if self.proposal else 0
        base_length = self.first_position + kept
        committed = (outcome.next_token,)
        return Round(self.session_id, base_length, outcome.node, committed, proposal, self.traceparent)


@dataclass(frozen=True)
class Stage:
    """Proposals for outcomes of the round at `base_length`: what the target may begin by itself behind it.

    Coupled acceptance only, so a proposal is its tokens and their parents.
    """

    session_id: int
    base_length: int
    proposals: tuple[tuple[Outcome, Proposal], ...]

    def __post_init__(self) -> None:
        staged = len(self.proposals)
        require(staged <= MAX_STAGED, "staged proposals", staged, f"at most {MAX_STAGED} for one round")
        for outcome, proposal in self.proposals:
            require(outcome.base_length == self.base_length, "outcome", outcome, f"of round {self.base_length}")
            require(len(proposal) >= 1, "staged proposal nodes", len(proposal), "at least 1")


@dataclass(frozen=True)
class Begun:
    """The round that the target began by itself with the first `nodes` nodes of what was drafted for the outcome."""

    base_length: int
    nodes: int


@dataclass(frozen=True)
class StepTimings:
    """Durations of one answer on the service's own clock; `service_ms` covers the others."""

    queue_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    service_ms: float = 0.0
    rows: int = 0
    sessions: int = 0


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of the unprocessed target distribution after one row."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """What the target drew for one round.

    coupled: `token_ids[0]` follows the root, `token_ids[i + 1]` follows node i.
    rejection, block: `token_ids[i]` is the recovered token for node i, the last
    is the bonus; `target_probabilities[i]` is p(x_i); block adds
    `residual_masses[i]` = S_i (`exactness`: S_0 … S_{k-1}).
    """

    session_id: int
    base_length: int
    token_ids: tuple[int, ...]
    target_probabilities: tuple[float, ...] = ()
    residual_masses: tuple[float, ...] = ()
    logprobs: tuple[RowLogprobs, ...] = ()
    timings: StepTimings = StepTimings()
    begun: Begun | None = None


@dataclass(frozen=True)
class TargetOpened:
    """The prefix is computed."""

    session_id: int
    reused_tokens: int = 0
    timings: StepTimings = StepTimings()


@dataclass(frozen=True)
class DraftBudget:
    """What a proposal may cost; `max_tokens` 0 asks for none.

    `tree_widths` make a static tree; without them more `max_nodes` than `max_tokens` make a dynamic
    one. `fan_out`: outcomes to prepare for behind each node while a round is verified.
    """

    max_tokens: int = 0
    tree_widths: tuple[int, ...] = ()
    max_nodes: int = 0
    fan_out: int = 0
    deadline_ms: int | None = None


@dataclass(frozen=True)
class DraftOpen:
    """Begins a session on the draft service and asks for the first proposal."""

    session_id: int
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    noise: NoiseKey
    acceptance: Acceptance
    drafter: str = ""
    budget: DraftBudget = DraftBudget()
    time_left_ms: int | None = None
    traceparent: str = ""
    max_length: int = 0
    end_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_prefix(self.token_ids, self.prompt_length, self.max_length)


@dataclass(frozen=True)
class Features:
    """Hidden states of accepted rows: little-endian `data` of `shape` [rows, layers, hidden]."""

    session_id: int
    first_position: int
    dtype: str
    shape: tuple[int, int, int]
    layer_ids: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Commit:
    """A round ended: `token_ids` follow the `committed_length` tokens before them."""

    session_id: int
    outcome: Outcome
    token_ids: tuple[int, ...]
    committed_length: int
    budget: DraftBudget = DraftBudget()
    features: Features | None = None
    traceparent: str = ""


@dataclass(frozen=True)
class Verifying:
    """What left for the target: by proposal id and node count, inline, or nothing; `budget` is each outcome's."""

    session_id: int
    base_length: int
    proposal_id: int = 0
    node_count: int = 0
    proposal: Proposal | None = None
    budget: DraftBudget = DraftBudget()


@dataclass(frozen=True)
class DraftOpened:
    """The draft service serves the session with `drafter`."""

    session_id: int
    drafter: str
    reused_tokens: int = 0
    feature_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class DraftedProposal:
    """A proposal and the outcome that it answers; `outcome` None answers the open.

    Prepared ahead it is sent again, longer, under the same id whenever it has grown.
    """

    session_id: int
    outcome: Outcome | None
    proposal: Proposal
    timings: StepTimings = StepTimings()


@dataclass(frozen=True)
class Close:
    """Ends a session; harmless if it is unknown."""

    session_id: int


@dataclass(frozen=True)
class Failure:
    """One session's error inside a link; the link's other sessions go on."""

    session_id: int
    code: int
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_ms: int | None = None
    retry_safe: bool = False
    session_closed: bool = False


TargetCommand = TargetOpen | Round | Stage | Close
TargetEvent = TargetOpened | Verdict | Features | Failure
DraftCommand = DraftOpen | Commit | Verifying | Close
DraftEvent = DraftOpened | DraftedProposal | Failure


@dataclass(frozen=True)
class ServiceStatus:
    """What a service is doing now."""

    incarnation: str
    fingerprint: Fingerprint
    sessions: int
    kv_rows: int
    max_kv_rows: int
    queue_length: int
    steps: int
    resident_bytes: int
    frames_sent: int


@dataclass(frozen=True)
class ChatMessage:
    """One chat message; role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class SpeculationSettings:
    """Per-request speculation; None leaves the choice to the coordinator."""

    off: bool = False
    drafter: str = ""
    num_draft_tokens: int | None = None
    tree_widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        k = self.num_draft_tokens
        require(k is None or 0 <= k <= MAX_PROPOSAL_NODES, "num_draft_tokens", k, f"in [0, {MAX_PROPOSAL_NODES}]")
        require(all(w >= 1 for w in self.tree_widths), "tree_widths", self.tree_widths, "at least 1 at each depth")


@dataclass(frozen=True)
class GenerateRequest:
    """One generation; exactly one of `prompt`, `messages` and `token_ids` is given."""

    prompt: str | None = None
    messages: tuple[ChatMessage, ...] = ()
    token_ids: tuple[int, ...] = ()
    model: str = ""
    sampling: SamplingParams = SamplingParams()
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    acceptance: Acceptance = Acceptance.COUPLED
    speculation: SpeculationSettings = SpeculationSettings()
    resume_token_ids: tuple[int, ...] = ()
    sample_index: int = 0

    def __post_init__(self) -> None:
        given = (self.prompt is not None) + bool(self.messages) + bool(self.token_ids)
        require(given == 1, "inputs given", given, "exactly 1 of prompt, chat messages and token ids, not empty")
        require(self.prompt != "", "prompt", self.prompt, "at least 1 character")
        NoiseKey(self.seed or 0, self.sample_index)
        self._check_length()
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop strings", len(self.stop), f"at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            size_ok = 1 <= len(text) <= MAX_STOP_CHARACTERS
            require(size_ok, "stop string", text, f"1 to {MAX_STOP_CHARACTERS} characters")
        for message in self.messages:
            known = message.role in ("system", "user", "assistant")
            require(known, "role", message.role, "system, user or assistant")
        resumable = not self.resume_token_ids or self.seed is not None
        require(resumable, "seed", self.seed, "given with resume_token_ids")
        wide = self.speculation.tree_widths and max(self.speculation.tree_widths) > 1
        tree_ok = not wide or self.acceptance is Acceptance.COUPLED
        require(tree_ok, "tree_widths", self.speculation.tree_widths, "1 at each depth unless acceptance is coupled")

    def _check_length(self) -> None:
        most = self.max_new_tokens
        require(most is None or most >= 1, "max_new_tokens", most, "at least 1")
        fewest = self.sampling.min_tokens
        require(most is None or fewest <= most, "min_tokens", fewest, f"at most max_new_tokens = {most}")
        ends = not (self.ignore_eos and self.sampling.grammar is not None)
        require(ends, "ignore_eos", self.ignore_eos, "left out with a grammar, which ends the text")


@dataclass(frozen=True)
class RoundRecord:
    """Where one round's time went; draft_wait + wire + target.service + accept = round_ms.

    Of a round that ran ahead `round_ms` is the time between two verdicts; the target's part
    began with the first of them, so the parts exceed the round by what that one was late.
    """

    base_length: int
    round_ms: float
    draft_wait_ms: float
    wire_ms: float
    target: StepTimings
    accept_ms: float
    proposed: int
    accepted: int
    cache_hit: bool
    drafter: str = ""
    draft: StepTimings = StepTimings()
    cache_miss: bool = False
    ran_ahead: bool = False


@dataclass(frozen=True)
class GenerationStats:
    """Statistics of one generation; names follow what load tools read from vLLM."""

    rounds: int = 0
    committed: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    time_to_first_token_ms: float = 0.0
    tokens_per_second: float = 0.0
    verify_ms_p50: float = 0.0
    draft_wait_ms_p50: float = 0.0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    num_spec_tokens: int = 0
    records: tuple[RoundRecord, ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted ÷ steps that carried a proposal; 1 if none did."""
        return 1 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted ÷ proposed; 0 if nothing was proposed."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)


@dataclass(frozen=True)
class Started:
    """Opens a generation's stream."""

    seed: int
    prompt_token_ids: tuple[int, ...]
    model: str


@dataclass(frozen=True)
class Tokens:
    """Newly committed tokens and the text that became certain with them.

    `text_ends[i]` counts the characters of `text` that were certain with token i; empty: not told.
    """

    token_ids: tuple[int, ...]
    text: str
    provenance: tuple[Provenance, ...]
    logprobs: tuple[RowLogprobs, ...] = ()
    text_ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Finished:
    """Ends a generation's stream; `text` was held back until now."""

    reason: FinishReason
    text: str
    stats: GenerationStats


GenerateEvent = Started | Tokens | Finished


@dataclass(frozen=True)
class ModelDescription:
    """A served model."""

    name: str
    target: Fingerprint
    draft: Fingerprint
    max_length: int
    drafters: tuple[str, ...]
    target_ready: bool
    draft_ready: bool


def _check_prefix(token_ids: Sequence[int], prompt_length: int, max_length: int) -> None:
    require(len(token_ids) >= 1, "prefix length", len(token_ids), "at least 1 token")
    in_range = 1 <= prompt_length <= len(token_ids)
    require(in_range, "prompt_length", prompt_length, f"in [1, {len(token_ids)}]")
    long_enough = max_length == 0 or max_length >= len(token_ids)
    require(long_enough, "max_length", max_length, f"at least the prefix's {len(token_ids)} tokens, or 0")
