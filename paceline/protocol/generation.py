"""What clients ask of a coordinator, and what they get."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.protocol.errors import require
from paceline.protocol.explanation import GroupReport
from paceline.protocol.handshake import Fingerprint
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, MODEL, NONE, OWN_MTP, Acceptance
from paceline.protocol.records import GenerationStats, RoundRecord
from paceline.protocol.sampling import NoiseKey, SamplingParams, check_top_logprobs
from paceline.protocol.target import RowLogprobs

MAX_MODEL_BYTES = 512
MAX_PEERS = 4096
"""Most peers in one description: some 200 bytes each."""
MAX_MESSAGES = 4096
MAX_INPUT_TOKENS = 1 << 20
"""Most token ids of a prompt, and of a resumed output, whatever the model's context length."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 1024


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


@dataclass(frozen=True)
class ChatMessage:
    """One chat message; role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class SpeculationSettings:
    """Per-request speculation; None leaves the choice to the coordinator.

    Drafters are named as `--drafter` names them: "none" means `off`, and "mtp" is "model:mtp".

    `explain` asks for `GenerationStats.explanation`, `report_rounds` for `Tokens.records`.
    """

    off: bool = False
    drafter: str = ""
    num_draft_tokens: int | None = None
    tree_widths: tuple[int, ...] = ()
    explain: bool = False
    report_rounds: bool = False

    def __post_init__(self) -> None:
        k = self.num_draft_tokens
        require(k is None or 0 <= k <= MAX_PROPOSAL_NODES, "num_draft_tokens", k, f"in [0, {MAX_PROPOSAL_NODES}]")
        require(all(w >= 1 for w in self.tree_widths), "tree_widths", self.tree_widths, "at least 1 at each depth")
        if self.drafter == NONE:
            object.__setattr__(self, "off", True)
            object.__setattr__(self, "drafter", "")
        if self.drafter == OWN_MTP:
            object.__setattr__(self, "drafter", f"{MODEL}:{OWN_MTP}")


@dataclass(frozen=True)
class GenerateRequest:
    """One generation; exactly one of `prompt`, `messages` and `token_ids` is given.

    Attributes:
        prediction: token ids that the output is expected to have, in large part; empty: none. They make it faster.
        prediction_text: the same as text; not both.
        stop_token_ids: end the text as end tokens do, but `ignore_eos` doesn't ignore them; they have no text.
    """

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
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()
    prediction_text: str = ""

    def __post_init__(self) -> None:
        inputs = (self.prompt is not None) + bool(self.messages) + bool(self.token_ids)
        require(inputs == 1, "inputs given", inputs, "exactly 1 of prompt, chat messages and token ids, not empty")
        require(self.prompt != "", "prompt", self.prompt, "at least 1 character")
        NoiseKey(self.seed or 0, self.sample_index)
        check_top_logprobs("prompt_logprobs", self.prompt_logprobs)
        self._check_length()
        self._check_sizes()
        for text in self.stop:
            size_ok = 1 <= len(text) <= MAX_STOP_CHARACTERS
            require(size_ok, "stop string", text, f"1 to {MAX_STOP_CHARACTERS} characters")
        for message in self.messages:
            role_ok = message.role in ("system", "user", "assistant")
            require(role_ok, "role", message.role, "system, user or assistant")
        resumable = not self.resume_token_ids or self.seed is not None
        require(resumable, "seed", self.seed, "given with resume_token_ids")
        wide = self.speculation.tree_widths and max(self.speculation.tree_widths) > 1
        tree_ok = not wide or self.acceptance is Acceptance.COUPLED
        require(tree_ok, "tree_widths", self.speculation.tree_widths, "1 at each depth unless acceptance is coupled")

    def _check_sizes(self) -> None:
        for name, values, most in (
            ("stop strings", self.stop, MAX_STOP_STRINGS),
            ("chat messages", self.messages, MAX_MESSAGES),
            ("token_ids", self.token_ids, MAX_INPUT_TOKENS),
            ("resume_token_ids", self.resume_token_ids, MAX_INPUT_TOKENS),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS),
            ("prediction", self.prediction, MAX_INPUT_TOKENS),
        ):
            require(len(values) <= most, name, len(values), f"at most {most}")
        once = not (self.prediction and self.prediction_text)
        require(once, "prediction", len(self.prediction), "0 tokens beside prediction_text, the same as text")
        size = len(self.model.encode("utf-8", "surrogatepass"))
        require(size <= MAX_MODEL_BYTES, "model bytes", size, f"at most {MAX_MODEL_BYTES}")

    def _check_length(self) -> None:
        most = self.max_new_tokens
        require(most is None or most >= 1, "max_new_tokens", most, "at least 1")
        fewest = self.sampling.min_tokens
        require(most is None or fewest <= most, "min_tokens", fewest, f"at most max_new_tokens = {most}")
        ends = not (self.ignore_eos and self.sampling.grammar is not None)
        require(ends, "ignore_eos", self.ignore_eos, "left out with a grammar, which ends the text")
        alone = not self.stop_token_ids or self.sampling.grammar is None
        require(alone, "stop_token_ids", self.stop_token_ids, "left out with a grammar, which ends the text")


@dataclass(frozen=True)
class Started:
    """Opens a generation's stream; `sampling` has the numbers in force, those of `FIELDS_WITH_DEFAULTS`."""

    seed: int
    prompt_token_ids: tuple[int, ...]
    model: str
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of the prompt, from the one at `first_position` on.

    Each row has the token itself, then the most probable ones in its place.
    """

    first_position: int
    rows: tuple[RowLogprobs, ...]


@dataclass(frozen=True)
class Tokens:
    """Newly committed tokens and the text that became certain with them.

    `text_ends[i]` counts the characters of `text` that were certain with token i; empty: not told.
    `replaced_token_ids` has the proposed token that each recovered one stands in place of; empty: not told.
    `records` are those of the rounds that committed them, where the request asked for them.
    """

    token_ids: tuple[int, ...]
    text: str
    provenance: tuple[Provenance, ...]
    logprobs: tuple[RowLogprobs, ...] = ()
    text_ends: tuple[int, ...] = ()
    replaced_token_ids: tuple[int, ...] = ()
    records: tuple[RoundRecord, ...] = ()


@dataclass(frozen=True)
class Finished:
    """Ends a generation's stream; `text` was held back until now."""

    reason: FinishReason
    text: str
    stats: GenerationStats


GenerateEvent = Started | PromptLogprobs | Tokens | Finished


class PeerKind(Enum):
    """Which kind of service a coordinator's peer is."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True)
class PeerDescription:
    """A service of a coordinator's pools, the link to it, and its load as far as the coordinator knows.

    `sessions` are the coordinator's own; those of the latest step, its rows and the queue are of all coordinators.
    `step_ms` is a step of one row; 0: not known. `problem` says why the link is down. `group`: what the coordinator's
    requests do at a target together; None: they never shared it.
    """

    kind: PeerKind
    address: str
    up: bool
    fingerprint: Fingerprint
    problem: str = ""
    sessions: int = 0
    step_sessions: int = 0
    step_rows: int = 0
    queue: int = 0
    step_ms: float = 0.0
    group: GroupReport | None = None


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
    peers: tuple[PeerDescription, ...] = ()
    sampling: SamplingParams = SamplingParams()
    """The model's own defaults; a number that is unstated has none."""
    max_new_tokens: int | None = None
    """The model's own default."""
    tenant: str = ""
    """The tenant of the caller's key; empty: the coordinator asks for no key."""

    @property
    def defaults(self) -> dict[str, float]:
        """The model's values for fields that a request leaves out, by their names; empty: it has none."""
        most = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return {**self.sampling.stated_numbers, **most}
